"""How the scales of quantised tensors are found: the values of `--fp8-recipe`.

The scope of a scale, that is, the values that it depends on, does not depend on the layout where the recipe allows it:

| recipe | a scale depends on |
|---|---|
| tensorwise | the whole tensor of a micro-batch, over tensor and context parallel ranks |
| delayed | the whole tensor of earlier global batches, over all ranks |
| blockwise | a block of 128 elements, or of 128 x 128 weights, on one rank |
| mxfp8 | a block of 32 elements on one rank |
| nvfp4 | a block of 16 elements, or of 16 x 16 weights, on one rank, and the values of tensorwise |

So the blocks are equal under every layout that cuts weights and tokens at multiples of 128, 32 or 16.

The rows and weights of experts are quantised in segments (`grouped.Segments`):

| recipe | a scale of experts depends on |
|---|---|
| tensorwise | the rows of one expert of a micro-batch; the weight of one expert |
| delayed | the tensors of all experts of a layer in earlier global batches; in the first step as tensorwise |
| blockwise | a block of 128 elements of the rows that a rank sends to an expert; 128 x 128 weights on a rank |
| mxfp8, nvfp4 | a block of the rows that a rank sends to an expert, or of weights on a rank; nvfp4: tensorwise too |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.communication.collectives import Group, all_reduce
from megatron.core.initializers import Constant
from megatron.core.ops.fp8.formats import BLOCK, Fp8Formats, scale_for
from megatron.core.ops.fp8.grouped import GroupedKernels, Segments, pair_of_segments
from megatron.core.ops.fp8.micro_batches import MicroBatches
from megatron.core.ops.fp8.product import accumulate_product, emulated_product
from megatron.core.ops.fp8.quantize import (
    QuantizedPair,
    cast_scaled,
    largest_value,
    noted_largest,
    noted_largest_of_rows,
    quantize_blocks,
    quantize_by_largest,
    whole_pair,
)
from megatron.core.ops.fp8.weight_blocks import WeightKernels
from megatron.core.parameters import declare
from megatron.core.utils.torch_private import foreach_copy_, foreach_zero_


class Role(IntEnum):
    """What a quantised matrix is to its linear layer."""

    INPUTS = 0
    """[tokens, in]"""
    WEIGHTS = 1
    """[out, in]"""
    GRADIENTS = 2
    """Gradients of the outputs, [tokens, out]."""


@dataclass(frozen=True)
class Fp8Kernels:
    """The operations of a linear layer in fp8, with the signatures of the functions of these names."""

    largest_value: Callable[..., Tensor] = largest_value
    cast_scaled: Callable[..., tuple[Tensor | None, Tensor | None]] = cast_scaled
    quantize_blocks: Callable[..., QuantizedPair] = quantize_blocks
    quantize_by_largest: Callable[..., QuantizedPair] = quantize_by_largest
    product: Callable[..., Tensor] = emulated_product
    accumulate_product: Callable[..., None] = accumulate_product
    grouped: GroupedKernels = field(default_factory=GroupedKernels)
    """Those of experts."""
    weights: WeightKernels = field(default_factory=WeightKernels)
    """Those of weights whose only whole copy is in fp8."""


@dataclass(frozen=True)
class Fp8Settings:
    """The fp8 flags of a run, for its layers."""

    recipe: str
    """tensorwise, delayed, blockwise, mxfp8 or nvfp4."""
    formats: Fp8Formats
    margin: int = 0
    history_len: int = 1
    amax_algo: str = "most_recent"
    """most_recent or max."""
    wgrad: bool = True
    """Whether weight gradients are computed in fp8 too."""
    keeps_weights: bool = True
    """Whether quantised weights are kept until the weights change."""
    kernels: Fp8Kernels = Fp8Kernels()

    def dtype(self, role: Role) -> torch.dtype:
        """Returns the fp8 type of a matrix."""
        return self.formats.gradients if role is Role.GRADIENTS else self.formats.inputs


@dataclass(frozen=True)
class LinearSplit:
    """The groups of ranks that divide the tensors of a linear layer. None: every rank has all of it."""

    outputs: Group = None
    """Divides the output channels: rows of the weight."""
    inputs: Group = None
    """Divides the input channels: columns of the weight."""
    tokens: Sequence[Group] = field(default=())
    """Groups that divide the tokens of a micro-batch."""

    def groups(self, role: Role) -> tuple[Sequence[Group], Sequence[Group]]:
        """Returns the groups that divide the rows and the columns of a matrix."""
        rows = (self.outputs,) if role is Role.WEIGHTS else self.tokens
        return rows, (self.outputs if role is Role.GRADIENTS else self.inputs,)


class Scaling(nn.Module):
    """Quantises the matrices of one linear layer, or of one linear layer of all experts of a rank."""

    weight_block: tuple[int, int] | None
    """Rows and columns of the blocks of a weight that have one scale each, 0 for all rows or columns. None: a weight
    and its transpose have different blocks, so it cannot exist only in fp8."""
    block = BLOCK
    """Elements along a side of a block."""

    def __init__(self, settings: Fp8Settings, split: LinearSplit, micro_batches: MicroBatches | None = None) -> None:
        super().__init__()
        self.settings, self.split, self.kernels = settings, split, settings.kernels
        self.micro_batches = micro_batches or MicroBatches()
        self.gradient_share = 1.0
        """The factor of this rank's gradients in the gradients of the global batch, which a data parallel wrapper
        applies after backward."""

    def quantize(
        self,
        matrix: Tensor,
        role: Role,
        segments: Segments | None = None,
        *,
        rows: bool,
        columns: bool,
        records: bool,
    ) -> Any:
        """Returns a matrix in fp8, as it is (`rows`) and transposed (`columns`): a QuantizedPair, or a
        QuantizedGroupsPair for `segments`, in which weights are [experts * out, in]. `records`: the matrix belongs to
        the training step."""
        raise NotImplementedError

    def weight_groups(self) -> Sequence[Group]:
        """Returns the groups of ranks over which the largest values of a weight's blocks are taken."""
        return dividing_groups(self.split, Role.WEIGHTS) if self.weight_block == (0, 0) else ()

    def weight_scales(self, amax: Tensor) -> Tensor:
        """Returns the scales of a weight from the largest values of its blocks over all ranks: of the same shape, or a
        scalar for all blocks."""
        return scale_for(amax, self.settings.dtype(Role.WEIGHTS), self.settings.margin)

    def forget(self) -> None:
        """Drops what was derived from saved state, because that may have been loaded."""

    def refresh(self) -> bool:
        """Computes the scales that follow from earlier steps. Returns whether there are any."""
        return False


class TensorwiseScaling(Scaling):
    """One scale for a tensor or a segment, from its own largest value ("current scaling")."""

    weight_block = (0, 0)

    def quantize(
        self,
        matrix: Tensor,
        role: Role,
        segments: Segments | None = None,
        *,
        rows: bool,
        columns: bool,
        records: bool,
    ) -> Any:
        """Casts by the scale of the largest value of the whole matrix, or of each segment's expert and micro-batch,
        over the ranks that divide it."""
        dtype, margin = self.settings.dtype(role), self.settings.margin
        groups = dividing_groups(self.split, role)
        if segments is None:
            amax = noted_largest(matrix)
            amax = largest_over(self.kernels.largest_value(matrix) if amax is None else amax, groups)
            return self.kernels.quantize_by_largest(matrix, dtype, margin, amax, rows=rows, columns=columns)
        of_rows, kernels = noted_largest_of_rows(matrix), self.kernels.grouped
        amax = largest_over(kernels.largest(matrix if of_rows is None else of_rows[:, None], segments), groups)
        if role is not Role.WEIGHTS:
            amax = self.micro_batches.largest(amax)
        return kernels.quantize_by_largest(matrix, dtype, segments, margin, amax, rows=rows, columns=columns)


_ALIGNED = 4
"""Numbers of four bytes in the 16 bytes that an address of a factor divides by."""


class DelayedScaling(Scaling):
    """One scale for a tensor, of all experts together, from its largest values in earlier steps, so that one pass
    quantises it.

    `amax_history` [3, steps] has the largest absolute values of inputs, weights and gradients over all micro-batches
    and ranks of a step, the latest step first, and zeros before the first step. Gradients count as shares of the global
    batch's, so that the history does not depend on the number of data parallel ranks. As long as all are zero, the
    scales are those of `TensorwiseScaling`. `finish_step` adds a step to the histories of all layers of a model.
    """

    weight_block = (0, 0)

    def __init__(
        self,
        settings: Fp8Settings,
        split: LinearSplit,
        device: torch.device,
        micro_batches: MicroBatches | None = None,
    ) -> None:
        super().__init__(settings, split, micro_batches)
        history = torch.zeros(len(Role), settings.history_len, dtype=torch.float32, device=device)
        self.amax_history = declare(nn.Parameter(history, requires_grad=False), Constant(0.0), is_state=True)
        self._seen: Tensor | None = None
        """[3]: largest values since the last step. All these keep their addresses, for CUDA graphs."""
        self._scales: Tensor | None = None
        """[3]"""
        self._factors: Tensor | None = None
        """[3, 4]: inverses of the scales, four times each, since cuBLAS wants addresses that divide by 16."""
        self._scales_are_current = False
        """Whether scales and factors follow from the present history."""
        self._is_cold: bool | None = None
        """Whether the history is empty; None: not known on the host."""
        self._first = TensorwiseScaling(settings, split, micro_batches)

    def quantize(
        self,
        matrix: Tensor,
        role: Role,
        segments: Segments | None = None,
        *,
        rows: bool,
        columns: bool,
        records: bool,
    ) -> Any:
        """Casts by the scales of earlier steps, and keeps the largest value for later ones."""
        dtype, scale = self.settings.dtype(role), self.scale_of(role)
        seen = self.seen_of(role) if records or role is Role.WEIGHTS else None
        if scale is None:
            if seen is not None:
                seen.copy_(torch.maximum(seen, self.kernels.largest_value(matrix)))
            return self._first.quantize(matrix, role, segments, rows=rows, columns=columns, records=records)
        scales = scale if rows else None, scale if columns else None
        if segments is not None:
            cast = self.kernels.grouped.cast(matrix, dtype, segments, *scales, seen)
            return pair_of_segments(*cast, self.factor_of(role))
        values, transposed = self.kernels.cast_scaled(matrix, dtype, *scales, seen)
        return whole_pair(values, transposed, self.factor_of(role))

    def weight_scales(self, amax: Tensor) -> Tensor:
        """Returns the scale of earlier steps, or those of the largest values before the first step; keeps the largest
        value for later steps."""
        scale, seen = self.scale_of(Role.WEIGHTS), self.seen_of(Role.WEIGHTS)
        seen.copy_(torch.maximum(seen, amax.amax()))
        # A copy: the weight is kept for as long as it does not change, and the next step changes the scale.
        return super().weight_scales(amax) if scale is None else scale.clone()

    def scale_of(self, role: Role) -> Tensor | None:
        """Returns the scale from earlier steps; None before the first step."""
        if self._is_cold is None:
            self._is_cold = not bool(self.amax_history.any())
        if self._is_cold:
            return None
        if not self._scales_are_current:
            _compute_scales([self], self.amax_history.detach()[None])
        return self._scales_here[role]

    def factor_of(self, role: Role) -> Tensor:
        """Returns the inverse of the scale that `scale_of` has returned."""
        factor = self._factors_here[role, 0]
        # The next step changes it in place, and a quantised weight is kept for as long as the weight does not change.
        return factor.clone() if role is Role.WEIGHTS else factor

    def seen_of(self, role: Role) -> Tensor:
        """Returns the largest value since the last step, which a cast raises."""
        return self._seen_here[role]

    @property
    def _seen_here(self) -> Tensor:
        self._seen = self._memory(self._seen, len(Role))
        return self._seen

    @property
    def _scales_here(self) -> Tensor:
        self._scales = self._memory(self._scales, len(Role))
        return self._scales

    @property
    def _factors_here(self) -> Tensor:
        self._factors = self._memory(self._factors, len(Role), _ALIGNED)
        return self._factors

    def _memory(self, present: Tensor | None, *shape: int) -> Tensor:
        """Returns the present tensor, or a new one if the history has moved to another device since."""
        if present is None or present.device != self.amax_history.device:
            return torch.zeros(shape, dtype=torch.float32, device=self.amax_history.device)
        return present

    def refresh(self) -> bool:
        """Computes the scales that follow from earlier steps. Returns whether there are any."""
        return self.scale_of(Role.INPUTS) is not None

    def take_seen(self) -> Tensor:
        """Returns the largest values of this rank since the last call, as in the history, float32 [3]. A value that is
        not finite counts as 0: its step is not applied."""
        return _take_seen([self])[0]

    def add_step(self, amax: Tensor) -> None:
        """Puts the largest values of a step, [3], in front of the history. A value of 0 repeats the step before."""
        _add_step([self], amax[None])

    @torch.no_grad()
    def mark_step_start(self) -> Callable[[], None]:
        """Returns a function that puts back the present history after a step, which is then computed again."""
        before, was_cold = self.amax_history.detach().clone(), self._is_cold

        @torch.no_grad()
        def go_back_to_start() -> None:
            # A weight that is kept in fp8 is not read again, so its largest value is that of the first computation.
            self.seen_of(Role.WEIGHTS).copy_(self.amax_history[Role.WEIGHTS, 0])
            self.amax_history.copy_(before)
            self._scales_are_current, self._is_cold = False, was_cold

        return go_back_to_start

    def forget(self) -> None:
        """Computes the scales from the history again."""
        self._scales_are_current, self._is_cold = False, None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DelayedScaling":
        # The history moves with the module and stays float32.
        before = self.amax_history.data
        super()._apply(fn, recurse)
        if self.amax_history.dtype is not torch.float32:
            self.amax_history.data = before.to(self.amax_history.device)
        self.forget()
        return self


@torch.no_grad()
def finish_step(layers: Sequence[DelayedScaling], group: Group = None) -> None:
    """Adds the largest values since the last call to the histories of all these layers, and computes the scales that
    follow. The number of operations does not grow with the number of layers.

    `group`: ranks that have copies or parts of the same layers. They call this together, with equal lists. A step's
    largest value is that of all of them.
    """
    batches = _alike(layers)
    amax = torch.cat([_take_seen(batch) for batch in batches])  # [layers, 3]
    all_reduce(amax, group, dist.ReduceOp.MAX)
    for batch, latest in zip(batches, amax.split([len(batch) for batch in batches]), strict=True):
        _add_step(batch, latest)


def _alike(layers: Sequence[DelayedScaling]) -> list[list[DelayedScaling]]:
    """Returns lists of layers whose scales follow from their histories in the same way: mostly one list."""
    lists: dict[Any, list[DelayedScaling]] = {}
    for layer in layers:
        settings = layer.settings
        kind = settings.history_len, settings.amax_algo, settings.margin, settings.formats, layer.gradient_share
        lists.setdefault(kind, []).append(layer)
    return list(lists.values())


def _take_seen(layers: Sequence[DelayedScaling]) -> Tensor:
    """`DelayedScaling.take_seen` of layers that are alike, [layers, 3]."""
    here = [layer._seen_here for layer in layers]
    seen = torch.stack(here)
    foreach_zero_(here)
    seen[:, Role.GRADIENTS].mul_(layers[0].gradient_share)
    return torch.where(seen.isfinite(), seen, torch.zeros_like(seen))


@torch.no_grad()
def _add_step(layers: Sequence[DelayedScaling], amax: Tensor) -> None:
    """`DelayedScaling.add_step` of layers that are alike: largest values [layers, 3]."""
    histories: list[Tensor] = [layer.amax_history for layer in layers]
    before = torch.stack(histories)  # [layers, 3, steps]
    latest = torch.where(amax > 0, amax.float(), before[..., 0])
    history = torch.cat([latest[..., None], before[..., :-1]], -1)
    foreach_copy_(histories, history.unbind())
    _compute_scales(layers, history)
    for layer in layers:
        layer._is_cold = False


def _compute_scales(layers: Sequence[DelayedScaling], history: Tensor) -> None:
    """Computes the scales of layers that are alike from their histories, [layers, 3, steps]."""
    settings, share = layers[0].settings, layers[0].gradient_share
    amax = history[..., 0] if settings.amax_algo == "most_recent" else history.amax(-1)  # [layers, 3]
    operands, gradients = amax[:, : Role.GRADIENTS], amax[:, Role.GRADIENTS :] / share
    scales = torch.cat(
        [
            scale_for(operands, settings.formats.inputs, settings.margin),
            scale_for(gradients, settings.formats.gradients, settings.margin),
        ],
        1,
    )
    here = [layer._scales_here for layer in layers] + [layer._factors_here for layer in layers]
    factors = (1.0 / scales)[..., None].repeat(1, 1, _ALIGNED)
    foreach_copy_(here, [*scales.unbind(), *factors.unbind()])
    for layer in layers:
        layer._scales_are_current = True


def dividing_groups(split: LinearSplit, role: Role) -> Sequence[Group]:
    """Returns the groups of ranks that divide a matrix."""
    return [group for groups in split.groups(role) for group in groups if group is not None]


def largest_over(amax: Tensor, groups: Sequence[Group]) -> Tensor:
    """Returns the largest values over the ranks of all these groups."""
    for group in groups:
        if group is not None:  # a copy, since a largest value that is noted on a tensor is this rank's own
            amax = all_reduce(amax.clone(), group, dist.ReduceOp.MAX)
    return amax
