"""What a parameter says about itself.

Initialisation, gradient finalisation, clipping, the optimizer, checkpoints and conversion read the descriptor of a
parameter; nobody keeps a table of names. A layer declares its parameters with `declare`; the model that owns the layer
names them with `name_parameters` once it is built, and draws their initial values with `initialize_parameters`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from megatron.core.collectives import Pending
from megatron.core.counter_rng import standard_normal, stream_key, uniform

# ---------------------------------------------------------------------------------------------------------------------
# Which part of the whole tensor is held


@dataclass(frozen=True)
class Box:
    """An axis-aligned part of a canonical tensor: `start` and `shape`, one entry a dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


# ---------------------------------------------------------------------------------------------------------------------
# Initial values


class Initializer(Protocol):
    """Fills a whole tensor in place. The kinds below can also give any box of it without making the rest."""

    def __call__(self, tensor: Tensor, /) -> object: ...


@dataclass(frozen=True)
class Normal:
    """N(0, std)."""

    std: float

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.normal_(tensor, mean=0.0, std=self.std)

    def values(self, index: Tensor, key: tuple[int, int], global_shape: tuple[int, ...]) -> Tensor:
        return standard_normal(index, key) * self.std


@dataclass(frozen=True)
class XavierUniform:
    """U(-a, a) with a = sqrt(6 / (fan in + fan out)) of the whole [out, in] tensor (Glorot and Bengio 2010)."""

    stacked: int = 0
    """How many dimensions, the first ones, number tensors that are drawn each by itself, such as experts'."""

    def __call__(self, tensor: Tensor) -> Tensor:
        for part in tensor.flatten(0, self.stacked - 1) if self.stacked else (tensor,):
            if part.dim() > 1:
                nn.init.xavier_uniform_(part)
        return tensor

    def values(self, index: Tensor, key: tuple[int, int], global_shape: tuple[int, ...]) -> Tensor:
        fan_in = global_shape[-1]
        bound = math.sqrt(6.0 / (fan_in + math.prod(global_shape[self.stacked : -1])))
        return (uniform(index, key) * 2.0 - 1.0) * bound


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.constant_(tensor, self.value)

    def values(self, index: Tensor, key: tuple[int, int], global_shape: tuple[int, ...]) -> Tensor:
        return torch.full_like(index, self.value, dtype=torch.float64)


@dataclass(frozen=True)
class EachOf:
    """An initialiser of one tensor, for a stack of them along the first dimension."""

    init: Initializer

    def __call__(self, tensor: Tensor) -> Tensor:
        for part in tensor:
            self.init(part.view(-1, part.shape[-1]))
        return tensor


def each_of(init: Initializer) -> Initializer:
    """An initialiser of a stack of tensors [n, ..., in], each drawn by `init` as a matrix [out, in]."""
    if isinstance(init, Normal | Constant):
        return init
    return dataclasses.replace(init, stacked=1) if isinstance(init, XavierUniform) else EachOf(init)


# ---------------------------------------------------------------------------------------------------------------------
# The descriptor


@dataclass(frozen=True)
class ParameterInfo:
    """The descriptor of one parameter on one rank.

    A rank holds exactly one box of the canonical tensor. The stored tensor is that box in row-major order, reshaped as
    the layer likes, followed by `padding` elements that belong to no canonical index (the rows that round a vocabulary
    up); those are zero and stay zero. So a flat range of the stored tensor is a flat range of the box. Where a plain
    [rows, columns] shape would leave a rank with several boxes, the canonical shape has more dimensions instead: the
    gate and up halves of a gated MLP are [2, ffn, h], of which a tensor parallel rank holds [2, ffn / tp, h].
    """

    global_shape: tuple[int, ...]
    """Shape of the canonical tensor: all ranks together, vocabulary unpadded."""
    box: Box
    """The part of it that this rank holds."""
    init: Initializer
    name: str = ""
    """Canonical name: layer numbers counted over the whole model, expert numbers global. Set by `name_parameters`."""
    part_of: str = ""
    """The canonical name where it is not the parameter's own path: the whole name (the copy of a tied embedding on the
    last pipeline stage), or, with leading dots, a relative one, as of Python's imports: one dot begins in the module
    that holds the parameter (".weight": another box of the weight beside it), each further one in the module around."""
    padding: int = 0
    """Elements at the end of the stored tensor that belong to no canonical index."""
    grid: Literal["dense", "expert"] = "dense"
    """Which grid of ranks replicates it: expert parameters are reduced over the expert data parallel group."""
    partial_gradient_axes: frozenset[str] = frozenset()
    """Grid axes over which every rank has only its tokens' part of the gradient although it holds the same values, such
    as `tp` for a norm under sequence parallelism: these are summed when gradients are finalised."""
    sharded_axes: frozenset[str] = frozenset()
    """Grid axes over which `box` differs. Over all other axes of its grid the parameter is a replica."""
    tied: bool = False
    """Also held, as the same canonical tensor, by another pipeline stage (embedding and head)."""
    tied_over: Literal["embd", "pos_embd"] = "embd"
    """Of a tied parameter: the group of the ranks of a pipeline that hold a copy."""
    embedding_or_output: bool = False
    """Takes the learning rate of --decoupled-lr."""

    @property
    def decays(self) -> bool:
        """Weight decay applies: matrices do, biases and one-dimensional parameters do not."""
        return len(self.global_shape) > 1 and not self.name.endswith(".bias")


def declare(
    parameter: nn.Parameter,
    init: Initializer,
    *,
    global_shape: tuple[int, ...] | None = None,
    box: Box | None = None,
    **facts: Any,
) -> nn.Parameter:
    """Attach a descriptor to a parameter; without `box` this rank holds all of it. Returns the parameter.

    `facts` are further fields of `ParameterInfo`. Whatever `parameter` holds beyond the box is its padding.
    """
    shape = tuple(global_shape if global_shape is not None else parameter.shape)
    box = box or Box.whole(shape)
    padding = parameter.numel() - box.numel
    assert padding >= 0, (tuple(parameter.shape), box)
    parameter.info = ParameterInfo(shape, box, init, padding=padding, **facts)  # type: ignore[attr-defined]
    return parameter


def info_of(parameter: Tensor) -> ParameterInfo:
    """The descriptor of a parameter; one that was never declared describes itself as whole on every rank."""
    info = getattr(parameter, "info", None)
    if info is None:
        shape = tuple(parameter.shape)
        # The published mark of a user's own norm: every tensor parallel rank sees its own tokens only.
        partial = frozenset({"tp"} if getattr(parameter, "sequence_parallel", False) else ())
        info = ParameterInfo(shape, Box.whole(shape), _Undeclared(), partial_gradient_axes=partial)
        parameter.info = info  # type: ignore[attr-defined]
    return info


def add_partial_gradient_axis(axis: str, *modules: object) -> None:
    """Say that every rank along a grid axis has only a part of the gradients of these modules' parameters. What is no
    module has none."""
    for module in modules:
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            info = info_of(parameter)
            axes = info.partial_gradient_axes | {axis}
            parameter.info = dataclasses.replace(info, partial_gradient_axes=axes)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Undeclared:
    """The value that the parameter's own module gave it stands."""

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor


def has_initial_value(info: ParameterInfo) -> bool:
    """The descriptor says what the parameter starts from; of one that was never declared only its module knew."""
    return not isinstance(info.init, _Undeclared)


# ---------------------------------------------------------------------------------------------------------------------
# Names


def canonical_names(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of a module, each parameter once, with global numbers for numbered children.

    A child of a ModuleList that has an attribute `canonical_index` (a layer's number over the whole model, from 0; an
    expert's global number) goes by that number instead of its local position.
    """
    seen: set[nn.Parameter] = set()
    for name, parameter in _walk(module, prefix):
        if parameter not in seen:
            seen.add(parameter)
            yield name, parameter


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, child in module._modules.items():
        if child is not None:
            number = getattr(child, "canonical_index", None) if isinstance(module, nn.ModuleList) else None
            yield from _walk(child, f"{prefix}{name if number is None else number}.")


def name_parameters(module: nn.Module) -> None:
    """Write the canonical name into the descriptor of every parameter of a whole model (or model chunk)."""
    for name, parameter in canonical_names(module):
        parameter.info = dataclasses.replace(info_of(parameter), name=canonical_name(name, info_of(parameter)))  # type: ignore[attr-defined]


def canonical_name(path: str, info: ParameterInfo) -> str:
    """The canonical name of a parameter that stands at `path` in its model."""
    relative = info.part_of.lstrip(".")
    if relative == info.part_of:
        return info.part_of or path
    outer = path.split(".")[: -(len(info.part_of) - len(relative))]
    return ".".join([*outer, relative])


# ---------------------------------------------------------------------------------------------------------------------
# Drawing the initial values

_DRAWN_AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Elements: few on a CPU, so that the integer temporaries stay in its caches; many on a GPU, to launch little."""


@torch.no_grad()
def initialize_parameters(module: nn.Module, seed: int) -> None:
    """Give every named parameter its initial value: a function of (seed, canonical name, canonical index) alone.

    Parameters on the meta device are left alone. An initialiser that is not one of ours gets the whole tensor, with
    torch's default CPU generator seeded from (seed, name) for the call.
    """
    for _, parameter in canonical_names(module):
        if parameter.device.type != "meta":
            initialize_parameter(parameter, seed)


@torch.no_grad()
def initialize_parameter(parameter: nn.Parameter, seed: int) -> None:
    """Draw one named parameter in place; see `initialize_parameters`."""
    info = info_of(parameter)
    if isinstance(info.init, _Undeclared):
        return
    draw_range(parameter.data.view(-1)[: info.box.numel], info, 0, stream_key(seed, info.name))
    parameter.data.view(-1)[info.box.numel :].zero_()


def draw_range(target: Tensor, info: ParameterInfo, start: int, key: tuple[int, int]) -> None:
    """Draw the flat range [start, start + numel) of the box into the one-dimensional `target`."""
    if not isinstance(info.init, Normal | XavierUniform | Constant):
        whole = torch.empty(info.global_shape, dtype=torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key[0] | key[1] << 32)
            info.init(whole)
        target.copy_(whole.view(-1)[canonical_index(info, start, target.numel())])
        return
    at_once = _DRAWN_AT_ONCE["cuda" if target.is_cuda else "cpu"]
    for first in range(0, target.numel(), at_once):
        part = target[first : first + at_once]
        index = canonical_index(info, start + first, part.numel(), target.device)
        part.copy_(info.init.values(index, key, info.global_shape))


def canonical_index(info: ParameterInfo, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Row-major index in the canonical tensor (int64) of `count` elements of the box, from flat position `start`."""
    position = torch.arange(start, start + count, dtype=torch.int64, device=device)
    if info.box.shape[1:] == info.global_shape[1:]:  # whole rows: the box is one run of the canonical tensor
        row_size = math.prod(info.global_shape[1:])
        return position + (info.box.start[0] if info.box.start else 0) * row_size
    index, stride = torch.zeros_like(position), 1
    for begin, extent, size in zip(
        reversed(info.box.start), reversed(info.box.shape), reversed(info.global_shape), strict=True
    ):
        index += (position % extent + begin) * stride
        position //= extent
        stride *= size
    return index


# ---------------------------------------------------------------------------------------------------------------------
# Where gradients go


class InputsToGather(Protocol):
    """Inputs of a product of which each rank of a group has some rows."""

    def start_gather(self) -> Pending:
        """Begin to gather all rows, [t, in]."""


class MainGrad(Protocol):
    """Takes the gradient of one parameter as soon as backward has it, in place of `.grad`."""

    defers_weight_grad: bool
    """At the moment products are kept as their factors, to be run later: their inputs may then be something that
    gathers them, so that no more than this rank's rows is kept."""

    def add_product(self, output_gradient: Tensor, inputs: "Tensor | InputsToGather") -> None:
        """Accumulate output_gradient^T @ inputs ([t, out], [t, in] -> [out, in]): the weight gradient of a linear."""

    def add_grouped_product(
        self, output_gradient: Tensor, inputs: Tensor, accumulate: Callable[[Tensor, Tensor, Tensor], None]
    ) -> None:
        """Accumulate by accumulate(gradient, output_gradient, inputs): the stacked weights of experts, of which each
        has some rows of both."""

    def add(self, gradient: Tensor) -> None:
        """Accumulate a gradient shaped as the stored parameter."""

    def add_rows(self, index: Tensor, gradient: Tensor) -> None:
        """Accumulate rows of a table: `gradient` [t, h] into the rows `index` (int64 [t]), which may repeat."""


def main_grad_accumulator(parameter: Tensor) -> MainGrad | None:
    """The main_grad that a data parallel wrapper gave this parameter; None means ordinary `.grad`."""
    return getattr(parameter, "main_grad_accumulator", None)
