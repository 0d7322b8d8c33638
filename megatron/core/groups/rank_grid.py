"""The ranks of each process group: integers only, no communication.

The ranks of the world form two grids. The dense grid has the axes tp, cp, dp, pp; the expert grid has etp, ep, edp, pp,
with ETP * EP * EDP = TP * CP * DP. Each rank is a point of both grids. A group is a set of ranks that differ only along
some axes of one grid.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron.core.exceptions import UserError

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""Megatron-LM's default; the first axis varies fastest. `--use-tp-pp-dp-mapping` gives tp-cp-ep-pp-dp."""

_DENSE_AXES = ("tp", "cp", "dp", "pp")
_EXPERT_AXIS_OF = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
"""Names of the expert axes, by their names in the order string."""

GROUP_AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
    "cp": ("cp",),
    "tp_cp": ("tp", "cp"),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp"),
    "tp_dp": ("tp", "dp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
    "ep": ("ep",),
    "expt_tp": ("etp",),
    "tp_ep": ("etp", "ep"),
    "tp_ep_pp": ("etp", "ep", "pp"),
    "expt_dp": ("edp",),
    # Within one instance of the sharded optimizer state, or across instances. With one instance, `intra` has all ranks.
    "intra_dp_cp": ("dp", "cp"),
    "intra_expt_dp": ("edp",),
    "inter_dist_opt": (),
    "inter_expt_dp": (),
    "intra_dist_opt": ("tp", "cp", "dp", "pp"),
}
"""Megatron-LM's names of groups, and the grid axes along which each extends."""


@dataclass(frozen=True)
class Axes:
    """One grid: names and sizes of its axes, fastest first. An axis can consist of two pieces with the same name."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def stride(self, name: str) -> int:
        """Returns the distance between neighbouring ranks along an axis of one piece."""
        return math.prod(self.sizes[: self.names.index(name)])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the index of a rank along each axis."""
        index, sizes = dict.fromkeys(self.names, 0), dict.fromkeys(self.names, 1)
        for name, size in zip(self.names, self.sizes, strict=True):
            rank, along = divmod(rank, size)
            index[name] += along * sizes[name]
            sizes[name] *= size
        return index

    def group(self, rank: int, along: Sequence[str]) -> tuple[int, ...]:
        """Returns the ranks, ascending, that differ from `rank` only along the axes `along`."""
        base, steps, stride = rank, [], 1
        for name, size in zip(self.names, self.sizes, strict=True):
            if name in along:
                base -= rank // stride % size * stride
                steps.append((stride, size))
            stride *= size
        ranks = [base]
        for stride, size in steps:
            ranks = [r + i * stride for i in range(size) for r in ranks]
        return tuple(ranks)  # strides ascend, and a faster axis spans less than the next stride: already sorted

    def groups(self, along: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns all groups along some axes: a partition of the world, ordered by first rank."""
        offsets = self.group(0, along)
        across = [name for name in self.names if name not in along]
        return [tuple([first + offset for offset in offsets]) for first in self.group(0, across)]


_OF_AN_INSTANCE = ("intra_dp_cp", "intra_expt_dp", "inter_dist_opt", "inter_expt_dp", "intra_dist_opt")
_OF_EXPERTS = ("intra_expt_dp", "inter_expt_dp")


def first_and_last(pipeline: Sequence[int]) -> list[int]:
    """Returns the ranks of a pipeline with the word embedding or the output layer: the first and the last."""
    return [pipeline[0]] if len(pipeline) == 1 else [pipeline[0], pipeline[-1]]


def first_only(pipeline: Sequence[int]) -> list[int]:
    """Returns the ranks of a pipeline with position embeddings: the first."""
    return [pipeline[0]]


def all_ranks(pipeline: Sequence[int]) -> list[int]:
    """Returns all ranks of a pipeline."""
    return list(pipeline)


@dataclass(frozen=True)
class RankGrid:
    """The sizes of all axes of a world of ranks, and the resulting groups. Raises UserError for sizes that do not
    fit."""

    world_size: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """None: equal to `tensor`."""
    order: str = DEFAULT_ORDER
    optimizer_instances: int = 1
    """Number of instances of the sharded optimizer state. Each is sharded over neighbouring data (and context) parallel
    ranks, `intra_dp_cp`; the ranks with the same shard are `inter_dist_opt`."""
    dense: Axes = field(init=False)
    experts: Axes = field(init=False)

    def __post_init__(self) -> None:
        for name in ("world_size", "tensor", "context", "pipeline", "expert"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} parallel size is {getattr(self, name)}; it must be at least 1")
        expert_tensor = self.tensor if self.expert_tensor is None else self.expert_tensor
        order = self._checked_order()
        model = self.tensor * self.context * self.pipeline
        expert_model = expert_tensor * self.expert * self.pipeline
        self._check_divides(model, "tensor x context x pipeline", (self.tensor, self.context, self.pipeline))
        self._check_divides(
            expert_model, "expert tensor x expert x pipeline", (expert_tensor, self.expert, self.pipeline)
        )
        dense = {"tp": self.tensor, "cp": self.context, "dp": self.world_size // model, "pp": self.pipeline}
        expert = {"tp": expert_tensor, "ep": self.expert, "dp": self.world_size // expert_model, "pp": self.pipeline}
        object.__setattr__(self, "expert_tensor", expert_tensor)
        names = [name for name in order if name in dense]
        object.__setattr__(self, "dense", Axes(tuple(names), tuple(dense[name] for name in names)))
        pieces = [(_EXPERT_AXIS_OF[name], expert[name]) for name in order if name in expert]
        # Both grids must have the same pipelines. If pp varies faster than dp, edp becomes two pieces: `inner` ranks
        # with the same dense coordinate dp come before pp, the others after it.
        inner = self.tensor * self.context // (expert_tensor * self.expert)
        if order.index("pp") < order.index("dp") and inner > 1:
            at = next(i for i, (name, _) in enumerate(pieces) if name == "pp")
            pieces = [(name, size // inner if name == "edp" else size) for name, size in pieces]
            pieces.insert(at, ("edp", inner))
        object.__setattr__(self, "experts", Axes(*zip(*pieces, strict=True)))
        if self.pipeline > 1 and self.dense.stride("pp") != self.experts.stride("pp"):
            raise UserError(
                f"with order {self.order} the pipelines of the dense and the expert grid differ; they agree when "
                f"expert tensor x expert ({expert_tensor} x {self.expert}) divides tensor x context "
                f"({self.tensor} x {self.context}), or with order {DEFAULT_ORDER}"
            )
        self._check_instances(dense["dp"] * dense["cp"], "data and context parallel ranks")
        self._check_instances(expert["dp"], "data parallel ranks of an expert")

    @property
    def data(self) -> int:
        """Data parallel size of the dense grid."""
        return self.axis_size("dp")

    def axis_size(self, name: str) -> int:
        """Returns the size of an axis of either grid."""
        axes = self.dense if name in self.dense.names else self.experts
        return math.prod(size for axis, size in zip(axes.names, axes.sizes, strict=True) if axis == name)

    def group(self, rank: int, along: Sequence[str]) -> tuple[int, ...]:
        """Returns the group of `rank` along axes of one grid: dense (tp, cp, dp, pp) or expert (etp, ep, edp, pp)."""
        return self._axes_of(along).group(rank, along)

    def groups(self, along: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns all groups along axes of one grid."""
        return self._axes_of(along).groups(along)

    def named_group(self, name: str, rank: int) -> tuple[int, ...]:
        """Returns the group of `rank` with one of the names of GROUP_AXES."""
        if name not in _OF_AN_INSTANCE or self.optimizer_instances == 1:
            return self.group(rank, GROUP_AXES[name])
        if name == "intra_dist_opt":
            return tuple(sorted(r for m in self.named_group("mp", rank) for r in self.named_group("intra_dp_cp", m)))
        return next(group for group in self._instances_of(name, rank) if rank in group)

    def named_groups(self, name: str) -> list[tuple[int, ...]]:
        """Returns all groups with one of the names of GROUP_AXES: a partition of the world."""
        if name not in _OF_AN_INSTANCE or self.optimizer_instances == 1:
            return self.groups(GROUP_AXES[name])
        if name == "intra_dist_opt":
            parts = [self._instances_of("intra_dp_cp", model[0]) for model in self.groups(GROUP_AXES["dp_cp"])]
            return [tuple(sorted(itertools.chain(*same))) for same in zip(*parts, strict=True)]
        whole = GROUP_AXES["expt_dp" if name in _OF_EXPERTS else "dp_cp"]
        return [group for ranks in self.groups(whole) for group in self._instances_of(name, ranks[0])]

    def _instances_of(self, name: str, rank: int) -> list[tuple[int, ...]]:
        """Returns the data parallel group of `rank` divided into instances, or into sets of ranks with the same
        shard."""
        whole = self.named_group("expt_dp" if name in _OF_EXPERTS else "dp_cp", rank)
        number = self.optimizer_instances
        return hierarchical_groups(whole, [len(whole) // number, number])[name.startswith("inter")]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the index of a rank along every axis of both grids."""
        return {**self.dense.coordinates(rank), **self.experts.coordinates(rank)}

    def _axes_of(self, along: Sequence[str]) -> Axes:
        for axes in (self.dense, self.experts):
            if set(along) <= set(axes.names):
                return axes
        raise UserError(
            f"no grid has all the axes {'-'.join(along)}; the grids have {self.dense.names} and {self.experts.names}"
        )

    def _checked_order(self) -> list[str]:
        order = self.order.lower().split("-")
        unknown = [name for name in order if name not in (*_DENSE_AXES, "ep")]
        if unknown or len(set(order)) != len(order):
            raise UserError(f"order {self.order!r} must name each of tp, cp, ep, dp, pp at most once")
        sizes = {"tp": self.tensor, "cp": self.context, "pp": self.pipeline, "ep": self.expert, "dp": self.world_size}
        missing = [name for name in sizes if name not in order]
        if any(sizes[name] != 1 for name in missing):
            raise UserError(f"order {self.order!r} leaves out {', '.join(n for n in missing if sizes[n] != 1)}")
        return order + missing

    def _check_instances(self, replicas: int, what: str) -> None:
        number = self.optimizer_instances
        if number < 1 or replicas % number:
            works = " or ".join(map(str, nearest_divisors(replicas, number)))
            raise UserError(
                f"{number} instances of the optimizer's state do not divide the {replicas} {what}; use {works}"
            )

    def _check_divides(self, product: int, what: str, sizes: tuple[int, ...]) -> None:
        if self.world_size % product == 0:
            return
        below = self.world_size // product * product
        works = f"{below} or {below + product}" if below else str(product)
        raise UserError(
            f"{what} = {' x '.join(map(str, sizes))} = {product} does not divide the {self.world_size} ranks; "
            f"start {works} ranks, or use sizes whose product is one of "
            f"{', '.join(map(str, nearest_divisors(self.world_size, product)))}"
        )


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns a short text for ranks: `0 to 7`, `0 to 120 by 8`, or a list."""
    if len(ranks) > 3:
        step = ranks[1] - ranks[0]
        if tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1, step)):
            return f"{ranks[0]} to {ranks[-1]}" + (f" by {step}" if step > 1 else "")
    if len(ranks) > 16:
        return f"{', '.join(map(str, ranks[:8]))}, ... {ranks[-1]}"
    return ", ".join(map(str, ranks))


def nearest_divisors(number: int, near: int) -> list[int]:
    """Returns the nearest divisors of `number` below and above `near`, which is not a divisor itself."""
    known = divisors(number)
    return [d for d in known if d < near][-1:] + [d for d in known if d > near][:1]


def parallel_sizes_near(sizes: Iterable[int], near: int, config: object) -> str:
    """Returns the nearest of these sizes of a parallel dimension, below and above `near`, as `3 or 6`. Leaves out those
    that do not divide the number of ranks, if the config knows it (`fixed_world_size`)."""
    world = getattr(config, "fixed_world_size", None)
    fitting = [size for size in sizes if world is None or world % size == 0]
    return " or ".join(map(str, [s for s in fitting if s < near][-1:] + [s for s in fitting if s > near][:1]))


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending. Above 2^32, only those d where d or number / d is at most 2^16."""
    small = [d for d in range(1, min(math.isqrt(number), 1 << 16) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def hierarchical_groups(ranks: Sequence[int], sizes: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Returns the groups of each level of a hierarchy over one group, innermost first.

    A group of level 0 has neighbouring ranks; a group of level i has ranks at a distance of prod(sizes[:i]). Raises
    UserError if the product of the sizes is not the size of the group.
    """
    if math.prod(sizes) != len(ranks):
        raise UserError(
            f"hierarchical sizes {' x '.join(map(str, sizes))} = {math.prod(sizes)} must multiply to the "
            f"context parallel size {len(ranks)}"
        )
    axes = Axes(tuple(f"level{i}" for i in range(len(sizes))), tuple(sizes))
    return [[tuple(ranks[i] for i in group) for group in axes.groups([name])] for name in axes.names]
