"""The process groups of one rank, built once and passed to all code that communicates.

A collection built from a `RankGrid` knows size, rank and members of every group without communication. It makes a torch
group when its attribute is first read, which waits for the other members of the group, like a collective. So read the
attribute only to communicate, and call `size`, `rank` or `ranks` for numbers.

Without torch.distributed a group of one rank is None. A larger group, as in a dry run, is a `PlannedGroup`, which knows
its ranks but cannot communicate.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from megatron.core.communication.collectives import Group, PlannedGroup, group_rank, group_ranks
from megatron.core.exceptions import UserError
from megatron.core.groups.rank_grid import GROUP_AXES, RankGrid, hierarchical_groups
from megatron.core.groups.rank_grid import all_ranks as all_ranks
from megatron.core.groups.rank_grid import first_and_last as first_and_last
from megatron.core.groups.rank_grid import first_only as first_only
from megatron.core.utils.communicator_settings import CommunicatorSettings
from megatron.core.utils.torch_groups import create_group_among_members, get_nccl_options
from megatron.core.utils.torch_private import set_group_timeout
from megatron.core.utils.warn import warn_on_first_rank

EmbeddingRanks = Callable[[Sequence[int]], Sequence[int]]


class ProcessGroupCollection:
    """The groups of this rank under Megatron-LM's names. Frozen after it was built from a grid or passed to the
    library.

    A user can also fill one by hand: `ProcessGroupCollection(tp=..., dp=...)` or by assignment. Reading a group that
    was not given then raises a UserError that names it.
    """

    AXES: ClassVar[dict[str, tuple[str, ...]]] = GROUP_AXES
    """The grid axes along which each group extends. The groups of some ranks of a pipeline (`embd`,
    `pos_embd`, `encoder_pp`, `decoder_pp`) and the list `hcp` have no axes."""

    tp: Group
    pp: Group
    mp: Group
    embd: Group
    pos_embd: Group
    encoder_pp: Group
    decoder_pp: Group
    cp: Group
    tp_cp: Group
    hcp: list[Group]
    ep: Group
    expt_tp: Group
    tp_ep: Group
    tp_ep_pp: Group
    tp_dp: Group
    tp_dp_cp: Group
    dp: Group
    dp_cp: Group
    expt_dp: Group
    intra_dp_cp: Group
    intra_expt_dp: Group
    inter_dist_opt: Group
    inter_expt_dp: Group
    intra_dist_opt: Group

    grid: RankGrid | None = None
    """The grid that the collection was built from; None for one filled by hand."""
    _frozen: bool = False

    def __init__(self, **groups: Any) -> None:
        for name, group in groups.items():
            setattr(self, name, group)

    @classmethod
    def from_grid(
        cls,
        grid: RankGrid,
        rank: int,
        *,
        hierarchical_context_sizes: Sequence[int] | None = None,
        embedding_ranks: EmbeddingRanks = first_and_last,
        position_embedding_ranks: EmbeddingRanks = first_only,
        encoder_ranks: EmbeddingRanks = all_ranks,
        decoder_ranks: EmbeddingRanks = all_ranks,
        timeout: timedelta | None = None,
        nccl_settings: CommunicatorSettings | None = None,
        planned: bool = False,
    ) -> "ProcessGroupCollection":
        """Returns the frozen collection of one rank of a grid. Makes no torch group yet. Each function takes the ranks
        of a pipeline and returns those with the word embedding or the head (`embd`), with position embeddings
        (`pos_embd`), with layers of an encoder (`encoder_pp`) and with layers of a decoder (`decoder_pp`).
        `nccl_settings`: settings of NCCL by group name. Groups of the same ranks share a communicator with the settings
        of the first of these groups; a warning names groups with other settings. With `planned` it never makes torch
        groups, as if torch.distributed were not initialized."""
        collection = cls()
        collection.grid = grid
        collection.__dict__.update(
            _rank=rank,
            _timeout=timeout,
            _nccl_settings=nccl_settings or {},
            _planned=planned,
            _made={},
            _own={},  # ranks of this rank's groups that were asked for
            _hierarchical_sizes=hierarchical_context_sizes,
            _pipeline_choice={
                "embd": embedding_ranks,
                "pos_embd": position_embedding_ranks,
                "encoder_pp": encoder_ranks,
                "decoder_pp": decoder_ranks,
            },
        )
        return collection.freeze()

    def freeze(self) -> "ProcessGroupCollection":
        """Prevents setting further groups. Returns self."""
        self.__dict__["_frozen"] = True
        return self

    def __setattr__(self, name: str, value: object) -> None:
        if self._frozen:
            raise UserError(f"a ProcessGroupCollection in use is frozen: cannot set `{name}`; build another")
        if name not in type(self).__annotations__:
            raise UserError(f"ProcessGroupCollection has no group `{name}`; its groups: {', '.join(_NAMES)}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for a name that is not set: a group to create, or a mistake.
        if name not in _NAMES:
            raise AttributeError(f"ProcessGroupCollection has no attribute {name!r}")
        if self.grid is None:
            raise UserError(f"this ProcessGroupCollection was filled by hand without `{name}`; set it before use")
        group: Any
        if name == "hcp":
            group = [self._make(ranks) for ranks in self.hierarchical_ranks()]
        else:
            group = self._make(self.ranks(name))
        self.__dict__[name] = group
        return group

    @property
    def global_rank(self) -> int:
        """Rank of this process in the world."""
        if self.grid is not None:
            return self._rank
        return dist.get_rank() if dist.is_initialized() else 0

    # Numbers, without communication ----------------------------------------------------------------------------------

    def ranks(self, name: str, of: int | None = None) -> tuple[int, ...]:
        """Returns the global ranks of a group, in group order. For a group of some ranks of a pipeline (`embd`), those
        of this rank's pipeline.

        `of` selects the group of another rank; a collection filled by hand does not know it.
        """
        if self.grid is None:
            assert of in (None, self.global_rank), of
            group = getattr(self, name)
            return (0,) if group is None else group_ranks(group)
        if of is not None and of != self._rank:
            return self._ranks_of(name, of)
        if name not in self._own:
            self._own[name] = self._ranks_of(name, self._rank)
        own: tuple[int, ...] = self._own[name]
        return own

    def _ranks_of(self, name: str, rank: int) -> tuple[int, ...]:
        assert self.grid is not None
        if name in _OF_PIPELINE:
            return tuple(self._pipeline_choice[name](self.grid.named_group("pp", rank)))
        return self.grid.named_group(name, rank)

    def size(self, name: str) -> int:
        """Returns the number of ranks of a group."""
        return len(self.ranks(name))

    def rank(self, name: str) -> int:
        """Returns this rank's index in a group; -1 if it is no member."""
        if self.grid is None:
            group = getattr(self, name)
            return group_rank(group)
        ranks = self.ranks(name)
        return ranks.index(self._rank) if self._rank in ranks else -1

    def hierarchical_ranks(self) -> list[tuple[int, ...]]:
        """Returns the ranks of this rank's group at each level of hierarchical context parallelism, innermost first."""
        sizes = self._hierarchical_sizes or [self.size("cp")]
        levels = hierarchical_groups(self.ranks("cp"), sizes)
        return [next(ranks for ranks in level if self._rank in ranks) for level in levels]

    def neighbours(self, name: str, count: int) -> Group:
        """Returns this rank's torch group if the ranks of a group are divided into groups of `count` neighbours."""
        ranks, first = self.ranks(name), self.rank(name) // count * count
        if self.grid is None:
            raise UserError(
                f"this ProcessGroupCollection was filled by hand, without groups of {count} ranks of `{name}`"
            )
        return self._make(ranks[first : first + count])

    # Torch's groups --------------------------------------------------------------------------------------------------

    def _make(self, ranks: tuple[int, ...]) -> Group:
        """Returns the torch group of some ranks: one for each set of ranks, and the world's own for all ranks. None if
        this rank is no member."""
        if self._rank not in ranks:
            return None
        if self._planned or not dist.is_initialized():
            return PlannedGroup(ranks, ranks.index(self._rank)) if len(ranks) > 1 else None
        options = self._nccl_options(ranks)
        if len(ranks) == dist.get_world_size() and options is None:
            return dist.group.WORLD
        if ranks not in self._made:
            # Made by the members alone, because ranks need groups at different times.
            self._made[ranks] = create_group_among_members(ranks, self._timeout, options)
        return self._made[ranks]

    def _nccl_options(self, ranks: tuple[int, ...]) -> object:
        """Returns the options of the group of these ranks; None without settings for it, and where NCCL is not used."""
        settings: CommunicatorSettings = self._nccl_settings
        names = [name for name in settings if self.ranks(name) == ranks]
        if not names or "nccl" not in dist.get_backend_config():
            return None
        name = names[0]
        unused = [other for other in names if settings[other] != settings[name]]
        if unused:
            warn_on_first_rank(
                f"--nccl-communicator-config-path: {' and '.join(unused)} and {name} have the same ranks in this "
                f"layout and share one communicator, which has the settings of {name}"
            )
        return get_nccl_options(name, settings)

    def has_channel(self, source: int, destination: int) -> bool:
        """Whether `channel` has already made the group of these two ranks."""
        return (source, destination) in self.__dict__.get("_channels", {})

    def channel(self, source: int, destination: int) -> Group:
        """Returns the group of two global ranks for messages from `source` to `destination`. One of them is this rank.

        A GPU's communicator runs one operation after the other, so each direction has its own group. Both ranks must
        call this at the same time, and for several channels in the same order.
        """
        channels = self.__dict__.setdefault("_channels", {})
        if (source, destination) not in channels:
            ranks = tuple(sorted((source, destination)))
            options = None if self.grid is None else self._nccl_options(self.ranks("pp"))
            channels[source, destination] = create_group_among_members(ranks, self.__dict__.get("_timeout"), options)
        return channels[source, destination]

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long a collective of these groups, and of groups made later, may wait."""
        self.__dict__["_timeout"] = timeout
        if not dist.is_initialized():
            return
        made = [*self.__dict__.get("_made", {}).values(), *self.__dict__.get("_channels", {}).values()]
        for group in (dist.group.WORLD, *made):
            set_group_timeout(timeout, group)

    def close(self) -> None:
        """Destroys the torch groups that were made, so that the process can build another collection."""
        for made in (self.__dict__.get("_made", {}), self.__dict__.get("_channels", {})):
            for group in made.values():
                dist.destroy_process_group(group)
            made.clear()


_OF_PIPELINE = ("embd", "pos_embd", "encoder_pp", "decoder_pp")
_NAMES = frozenset((*ProcessGroupCollection.AXES, *_OF_PIPELINE, "hcp"))
GROUPS_WITH_SETTINGS = tuple(sorted(_NAMES - {"hcp"}))
"""Names of the groups that a file of NCCL settings may name."""


# ---------------------------------------------------------------------------------------------------------------------
# The default, for public constructors that are called without groups
