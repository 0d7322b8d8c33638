"""Descriptors of parameters: canonical name and shape, the part on this rank, and how gradients are summed.

Initialisation, gradient finalisation, clipping, the optimizer, checkpoints and conversion read the descriptor; no code
keeps a table of parameter names. A layer declares its parameters with `declare`. The model that contains the layer
names them with `name_parameters` after it is built, and draws their initial values with `initialize_parameters`.
"""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from megatron.core.communication.collectives import Pending
from megatron.core.counter_rng import stream_key
from megatron.core.initializers import Constant, Initializer, Normal, XavierUniform

# ---------------------------------------------------------------------------------------------------------------------
# The part of the whole tensor on a rank


@dataclass(frozen=True)
class Box:
    """A rectangular part of a canonical tensor: `start` and `shape` have one entry for each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """Returns the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in its canonical tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# The descriptor


@dataclass(frozen=True)
class ParameterInfo:
    """The descriptor of one parameter on one rank.

    A rank holds exactly one box of the canonical tensor. The stored tensor is that box in row-major order, in any
    shape, followed by `padding` elements without a canonical index (the rows that round up a vocabulary), which stay
    zero. So a flat range of the stored tensor is a flat range of the box. If a rank would hold several boxes of a
    [rows, columns] tensor, the canonical shape has more dimensions instead: the gate and up halves of a gated MLP are
    [2, ffn, h], and a tensor parallel rank holds [2, ffn / tp, h].
    """

    global_shape: tuple[int, ...]
    """Shape of the canonical tensor on all ranks together, without padding of the vocabulary."""
    box: Box
    """The part of the canonical tensor on this rank."""
    init: Initializer
    name: str = ""
    """Canonical name: layer numbers counted over the whole model, expert numbers global. Set by `name_parameters`."""
    part_of: str = ""
    """The canonical name, if it differs from the parameter's path. Either a whole name (for the copy of a tied
    embedding on the last pipeline stage) or, with leading dots, a relative name as in Python's imports: one dot means
    the module that has the parameter (".weight": another box of the same module's weight), each further dot one module
    above."""
    padding: int = 0
    """Number of elements at the end of the stored tensor without a canonical index."""
    grid: Literal["dense", "expert"] = "dense"
    """The grid of ranks that replicates the parameter: gradients of experts are reduced over expert data parallel
    ranks."""
    partial_gradient_axes: frozenset[str] = frozenset()
    """Grid axes along which all ranks hold the same values but each rank has only a part of the gradient, such as `tp`
    for a norm under sequence parallelism. `finalize_model_grads` sums the gradients along these axes."""
    sharded_axes: frozenset[str] = frozenset()
    """Grid axes along which `box` differs. Along all other axes of its grid the parameter is replicated."""
    tied: bool = False
    """Whether another pipeline stage has a copy of the same canonical tensor (embedding and head)."""
    tied_over: Literal["embd", "pos_embd", "encoder_pp", "decoder_pp"] = "embd"
    """For a tied parameter: the group of the ranks of a pipeline with a copy."""
    embedding_or_output: bool = False
    """Whether --decoupled-lr sets its learning rate."""
    is_table: bool = False
    """Whether its rows are only looked up, as in tables of positions, token types and relative position biases."""
    is_depthwise: bool = False
    """Whether each of its rows multiplies one channel, as in a depthwise convolution."""
    is_added_to_directly: bool = False
    """Whether an operation that cannot multiply by a factor adds to the main gradient's tensor itself, between
    `begin_write` and `end_write`."""
    is_state: bool = False
    """For a parameter without gradient: whether code writes it while the run goes on, such as biases that balance
    experts. Each rank keeps it whole."""
    in_nf4: bool = False
    """Whether its layer will read it in 4 bits (--lora-base-weights nf4)."""
    separate_heads: tuple[int, ...] = ()
    """For a fused projection [groups, heads, d, h]: the numbers of query, gate, key and value heads. Each kind is a
    separate matrix."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: True for matrices, False for biases and one-dimensional parameters."""
        return len(self.global_shape) > 1 and not self.name.endswith(".bias")

    @property
    def grows_with_width(self) -> bool:
        """Whether it is a matrix of a layer whose number of inputs grows with the width of the model (muP)."""
        return self.decays and not (self.embedding_or_output or self.is_table or self.is_depthwise)


def declare(
    parameter: nn.Parameter,
    init: Initializer,
    *,
    global_shape: tuple[int, ...] | None = None,
    box: Box | None = None,
    **facts: Any,
) -> nn.Parameter:
    """Attaches a descriptor to a parameter and returns the parameter. Without `box` this rank has the whole tensor.

    `facts` are further fields of `ParameterInfo`. Elements of `parameter` beyond the box are its padding.
    """
    shape = tuple(global_shape if global_shape is not None else parameter.shape)
    box = box or Box.whole(shape)
    padding = parameter.numel() - box.numel
    assert padding >= 0, (tuple(parameter.shape), box)
    parameter.info = ParameterInfo(shape, box, init, padding=padding, **facts)  # type: ignore[attr-defined]
    return parameter


def info_of(parameter: Tensor) -> ParameterInfo:
    """Returns the descriptor of a parameter. A parameter that was never declared gets one: whole on every rank."""
    info = getattr(parameter, "info", None)
    if info is None:
        shape = tuple(parameter.shape)
        # Megatron-LM's mark of a user's own norm: each tensor parallel rank sees only its own tokens.
        partial = frozenset({"tp"} if getattr(parameter, "sequence_parallel", False) else ())
        info = ParameterInfo(shape, Box.whole(shape), _Undeclared(), partial_gradient_axes=partial)
        parameter.info = info  # type: ignore[attr-defined]
    return info


def add_partial_gradient_axis(axis: str, *modules: object) -> None:
    """Adds a grid axis to `partial_gradient_axes` of all parameters of these modules. Ignores objects that are no
    modules."""
    for module in modules:
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            info = info_of(parameter)
            axes = info.partial_gradient_axes | {axis}
            parameter.info = dataclasses.replace(info, partial_gradient_axes=axes)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Undeclared:
    """Keeps the value that the parameter's own module has set."""

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor


def has_initial_value(info: ParameterInfo) -> bool:
    """Whether the descriptor has the initial value; for a parameter that was never declared, only its module knows
    it."""
    return not isinstance(info.init, _Undeclared)


# ---------------------------------------------------------------------------------------------------------------------
# Names


def canonical_names(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields names and parameters of a module, each parameter once, with global numbers for numbered children.

    A child of a ModuleList with an attribute `canonical_index` (number of a layer in the whole model, from 0; global
    number of an expert) is named by that number instead of its local index.
    """
    seen: set[nn.Parameter] = set()
    for name, parameter in _walk(module, ""):
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
    """Writes the canonical name into the descriptor of every parameter of a model (or model chunk)."""
    for name, parameter in canonical_names(module):
        parameter.info = dataclasses.replace(info_of(parameter), name=canonical_name(name, info_of(parameter)))  # type: ignore[attr-defined]


def canonical_name(path: str, info: ParameterInfo) -> str:
    """Returns the canonical name of a parameter at `path` in its model."""
    relative = info.part_of.lstrip(".")
    if relative == info.part_of:
        return info.part_of or path
    outer = path.split(".")[: -(len(info.part_of) - len(relative))]
    return ".".join([*outer, relative])


# ---------------------------------------------------------------------------------------------------------------------
# Drawing the initial values

_DRAWN_AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Elements per call: few on a CPU, so that integer temporaries stay in its caches; many on a GPU, for few launches."""


@torch.no_grad()
def initialize_parameters(module: nn.Module, seed: int) -> None:
    """Sets the initial value of every named parameter: a function of (seed, canonical name, canonical index) alone.

    Skips parameters on the meta device. An initialiser that is not one of ours is called with the whole tensor, while
    torch's default CPU generator is seeded from (seed, name).
    """
    for _, parameter in canonical_names(module):
        if parameter.device.type != "meta":
            initialize_parameter(parameter, seed)


@torch.no_grad()
def initialize_parameter(parameter: nn.Parameter, seed: int) -> None:
    """Sets the initial value of one named parameter; see `initialize_parameters`."""
    info = info_of(parameter)
    if isinstance(info.init, _Undeclared):
        return
    draw_range(parameter.data.view(-1)[: info.box.numel], info, 0, stream_key(seed, info.name))
    parameter.data.view(-1)[info.box.numel :].zero_()


def draw_range(target: Tensor, info: ParameterInfo, start: int, key: tuple[int, int]) -> None:
    """Writes the initial values of the flat range [start, start + numel) of the box to the one-dimensional `target`."""
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
    """Returns the row-major indices in the canonical tensor (int64) of `count` elements of the box, from flat index
    `start`."""
    position = torch.arange(start, start + count, dtype=torch.int64, device=device)
    if info.box.shape[1:] == info.global_shape[1:]:  # whole rows: the box is one range of the canonical tensor
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
# Main gradients


class InputsToGather(Protocol):
    """Inputs of a matrix product whose rows are distributed over the ranks of a group."""

    def start_gather(self) -> Pending:
        """Starts to gather all rows, [t, in]."""


class AccumulateProduct(Protocol):
    """A function that adds a product of output gradients and inputs to a gradient."""

    def __call__(self, gradient: Tensor, output_gradient: Tensor, inputs: Tensor, /, *, factor: float) -> object:
        """Adds `factor` times the product. A function whose attribute `can_replace` is true also takes `replaces`: with
        it the product is written over the gradient, of which nothing is read."""


class MainGrad(Protocol):
    """Accumulates the gradient of one parameter as soon as backward has computed it. It replaces `.grad`."""

    gradient: Tensor
    """The accumulated gradient, with the parameter's shape. Code that adds to it directly calls `begin_write` and
    `end_write`."""
    defers_weight_grad: bool
    """Whether products that are added now are deferred. Their inputs may then be an `InputsToGather`, so that the queue
    keeps only this rank's rows."""

    def add_product(self, output_gradient: Tensor, inputs: "Tensor | InputsToGather") -> None:
        """Accumulates output_gradient^T @ inputs ([t, out], [t, in] -> [out, in]): the weight gradient of a linear
        layer."""

    def add_grouped_product(
        self,
        output_gradient: Tensor,
        inputs: "Tensor | InputsToGather",
        accumulate: AccumulateProduct,
    ) -> None:
        """Accumulates a product by `accumulate`. Used for the stacked weights of experts, each with its own rows, and
        for products of quantised factors."""

    def add(self, gradient: Tensor) -> None:
        """Accumulates a gradient shaped as the stored parameter."""

    def begin_write(self) -> None:
        """Makes sure that `gradient` has memory, for code that adds to it."""

    def end_write(self) -> None:
        """Reports that the caller has added a micro-batch's gradient to `gradient`."""

    def counted_once(self) -> AbstractContextManager[None]:
        """Returns a context whose contributions are reported as one, at its end. No product inside it is deferred."""

    def add_rows(self, index: Tensor, gradient: Tensor) -> None:
        """Accumulates rows of a table: `gradient` [t, h] into the rows `index` (int64 [t]), which may repeat."""


def main_grad_accumulator(parameter: Tensor) -> MainGrad | None:
    """Returns the accumulator that a data parallel wrapper gave this parameter; None means ordinary `.grad`."""
    return getattr(parameter, "main_grad_accumulator", None)
