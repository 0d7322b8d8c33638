"""The groups of public constructors and functions that a user calls without groups.

`megatron.facades.parallel_state` fills them, as initialize_model_parallel() of Megatron-LM does, and a run fills them
for the functions of its script. The library passes groups to everything that it builds, so it never needs them.
"""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from megatron.core.communication.collectives import Group
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid

_default: ProcessGroupCollection | None = None


def default_collection() -> ProcessGroupCollection:
    """Returns the collection that initialize_model_parallel() has made; in a single process, one without groups.

    Raises UserError among several ranks if no
    collection was made.
    """
    if _default is not None:
        return _default
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise UserError(
            f"no process groups among {dist.get_world_size()} ranks: call "
            "megatron.facades.parallel_state.initialize_model_parallel() first, or pass pg_collection"
        )
    return ProcessGroupCollection.from_grid(RankGrid(1), rank=0)


def has_default_collection() -> bool:
    """Whether a default collection was set."""
    return _default is not None


def set_default_collection(collection: ProcessGroupCollection | None) -> None:
    """Sets the default collection and freezes it; None removes it."""
    global _default
    _default = collection.freeze() if collection is not None else None


@contextlib.contextmanager
def default_for_now(collection: ProcessGroupCollection) -> Iterator[None]:
    """Inside the context, these are the default groups. At the end those before are, if there were any."""
    before = _default
    set_default_collection(collection)
    try:
        yield
    finally:
        set_default_collection(before)


def groups_or_default(pg_collection: ProcessGroupCollection | None) -> ProcessGroupCollection:
    """Returns the groups that were passed to a constructor, or the default."""
    return default_collection() if pg_collection is None else pg_collection


def tp_group_or_default(tp_group: Group) -> Group:
    """Returns the tensor parallel group that was passed, or that of the default groups."""
    return default_collection().tp if tp_group is None else tp_group


def pp_rank_or_default(pp_rank: int | None) -> int:
    """Returns the pipeline rank that was passed, or that of the default groups."""
    return default_collection().rank("pp") if pp_rank is None else pp_rank
