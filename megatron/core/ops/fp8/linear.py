"""The linear layer y = x W^T + b with products in fp8. It communicates as `megatron.core.ops.linear` does.

Inputs, weights and gradients of outputs are rounded to fp8; products accumulate in float32, and a weight gradient is
added to the main gradient in float32. The weight is rounded once for all micro-batches of a step. The weights that the
optimizer updates, and those in a checkpoint, are never rounded.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.communication.collectives import (
    Group,
    gather_rows,
    start_all_reduce,
    start_gather_rows,
    start_reduce_scatter_rows,
)
from megatron.core.exceptions import UserError
from megatron.core.ops.fp8.block_recipes import build_scaling
from megatron.core.ops.fp8.microscaling import MX_BLOCK
from megatron.core.ops.fp8.quantize import Quantized, QuantizedPair
from megatron.core.ops.fp8.recipes import Fp8Settings, LinearSplit, Role
from megatron.core.ops.fp8.weight_blocks import WeightBlocks
from megatron.core.ops.linear import SequenceShard, add_weight_gradient, defers_weight_grad, sum_rows
from megatron.core.parameters import main_grad_accumulator
from megatron.core.utils.autograd_context import AutogradContext
from megatron.core.utils.graph_capture import fill_nested

_MULTIPLE = 16
"""The fp8 units of GPUs multiply matrices whose dimensions divide by it."""


Pair = TypeVar("Pair", bound=Any)
"""A quantised weight in two layouts: an object with `rows` and `columns`."""


class GatheredWeight(Protocol):
    """A weight whose only whole copy is in fp8, in memory of a data parallel wrapper."""

    def gathered(self) -> tuple[int, Tensor, Tensor]:
        """Returns a number that changes with the weight, the weight in fp8, shaped as the parameter, and its scales:
        float32 [groups, blocks down, blocks across] or a scalar. Gathers the weight if it is not whole."""


class QuantizedWeights(nn.Module, Generic[Pair]):
    """A linear layer in fp8 that keeps its quantised weight until the weight changes."""

    scaling: Any
    """Quantises the layer's matrices."""

    def __init__(self, settings: Fp8Settings, weight: Tensor) -> None:
        """Raises UserError for sizes that do not divide by 16, or by the blocks of MXFP8."""
        super().__init__()
        shape, multiple = list(weight.shape[-2:]), MX_BLOCK if settings.recipe == "mxfp8" else _MULTIPLE
        if any(size % multiple for size in shape):
            raise UserError(
                f"{'--fp4-format' if settings.recipe == 'nvfp4' else '--fp8-format'}: a linear layer has a weight of "
                f"{shape} on a rank, and both sizes must divide by {multiple}; change the width, or the number of "
                "tensor parallel ranks"
            )
        self.settings = settings
        self._keeps_weights = settings.keeps_weights
        """Whether quantised weights are kept until the weight changes."""
        self._kept: tuple[Any, Pair] | None = None
        self._storage: Pair | None = None
        """The memory of the quantised weight, if its address is fixed."""
        self._has_fixed_storage = False
        self._last_weight: tuple[Tensor] | None = None
        """The weight that was quantised last. In a tuple, so that it is no parameter of this module."""
        self._own_weight = (weight,)
        self._gathered: GatheredWeight | None = None

    @property
    def own_weight(self) -> Tensor:
        """The weight that the layer was built for."""
        return self._own_weight[0]

    @property
    def can_gather_weight(self) -> bool:
        """Whether the layer can compute with a weight that exists only in fp8."""
        return self.scaling.weight_block is not None

    def weight_blocks(self) -> WeightBlocks:
        """Returns the blocks of the layer's weight that have one scale each."""
        assert self.can_gather_weight
        return WeightBlocks.of(self.own_weight.shape, self.scaling.weight_block)

    def take_gathered_weight(self, weight: GatheredWeight) -> None:
        """From now on the layer reads its weight in fp8 here, and no values of its parameter."""
        self._gathered = weight

    def adapt_to_data_parallel(self, gradient_share: float, shards_weights: bool) -> None:
        """Takes what a data parallel wrapper decides.

        `gradient_share`: see `Scaling.gradient_share`. With `shards_weights` the weight is sharded between uses, and
        its quantised form is not kept.
        """
        self.scaling.gradient_share = gradient_share
        self._keeps_weights = self.settings.keeps_weights and not shards_weights

    def fix_storage(self) -> None:
        """Makes the kept weight and the scales keep their addresses from now on, as CUDA graphs need it. Call `refresh`
        after a change of the weight and before a replay."""
        self._has_fixed_storage = True

    @torch.no_grad()
    def refresh(self) -> bool:
        """Quantises the weight now if it has changed, and computes the scales. Returns whether the scales follow from
        earlier steps, with which other operations run. Waits for the device at most once after a checkpoint is
        loaded."""
        is_warm: bool = self.scaling.refresh()
        if self._keeps_weights and self._last_weight is not None:
            self._quantized_weight(self._last_weight[0], rows=True, columns=True)
        return is_warm

    def weight_rows(self, weight: Tensor) -> object:
        """Returns the weight in fp8, [out, in]; stacked weights as [experts * out, in]."""
        rows = self._quantized_weight(weight, rows=True).rows
        assert rows is not None
        return rows

    def weight_columns(self, weight: Tensor) -> object:
        """Returns the transposed weight in fp8, [in, out]; stacked weights as [in, experts * padded out]."""
        columns = self._quantized_weight(weight, columns=True).columns
        assert columns is not None
        return columns

    def _quantized_weight(self, weight: Tensor, rows: bool = False, columns: bool = False) -> Pair:
        """Returns the weight in at least these layouts; in both, if they are kept."""
        gathered = self._gathered.gathered() if self._gathered is not None and weight is self.own_weight else None
        key = gathered[:1] if gathered is not None else (weight.data_ptr(), weight._version)
        if self._kept is not None and self._kept[0] == key:
            return self._kept[1]
        if gathered is not None:
            pair = self._pair_of(*gathered[1:], columns or self._keeps_weights)
        else:
            pair = self._quantize(weight, rows or self._keeps_weights, columns or self._keeps_weights)
        if self._keeps_weights:
            if self._has_fixed_storage:
                pair, self._last_weight = self._stored(pair), (weight,)
            self._kept = key, pair
        return pair

    def _stored(self, pair: Pair) -> Pair:
        """Returns a quantised weight at its fixed addresses."""
        if self._storage is None:
            self._storage = pair
        else:
            fill_nested(self._storage, pair)
        return self._storage

    def _quantize(self, weight: Tensor, rows: bool, columns: bool) -> Pair:
        raise NotImplementedError

    def _pair_of(self, codes: Tensor, scales: Tensor, columns: bool) -> Pair:
        """Returns a weight that is in fp8 already, in the memory of `codes`, and transposed (`columns`)."""
        raise NotImplementedError

    def forget_weights(self) -> None:
        """Drops the quantised weight, because the weight may have changed without torch's knowledge."""
        self._kept = None

    surrounds_forward = False
    """Whether the forward of the whole model has to run inside `around_forward`."""

    def around_forward(self) -> AbstractContextManager[None]:
        """Returns the context in which the forward of the whole model runs."""
        return nullcontext()

    def forget(self) -> None:
        """Drops all that was derived from weights and saved state, because they may have been loaded."""
        self.forget_weights()
        self.scaling.forget()


class Fp8Linear(QuantizedWeights[QuantizedPair]):
    """The products of one linear layer, with its scales and its quantised weight. Called like `ops.linear.linear`."""

    def __init__(
        self,
        settings: Fp8Settings,
        split: LinearSplit,
        weight: Tensor,
        add_rows: Callable[[Tensor], Tensor] = sum_rows,
    ) -> None:
        """`weight` [out, in] gives the sizes and the device. `add_rows` computes the bias's gradient.

        Raises UserError for sizes that do not divide by 16.
        """
        super().__init__(settings, weight)
        self.add_rows = add_rows
        self.scaling = build_scaling(settings, split, weight.device)

    def forward(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        group: Group = None,
        *,
        gathers: bool = False,
    ) -> Tensor:
        """Returns inputs @ weight^T + bias: [..., in] x [out, in] (+ [out]) -> [..., out]; see `ops.linear.linear`."""
        rows = inputs.flatten(0, -2)  # [t, in]
        output = _Fp8Linear.apply(rows, weight, bias, self, group, gathers, torch.is_grad_enabled())
        return output if inputs.dim() == 2 else output.unflatten(0, (-1, *inputs.shape[1:-1]))

    def _quantize(self, weight: Tensor, rows: bool, columns: bool) -> QuantizedPair:
        return self.scaling.quantize(weight.detach(), Role.WEIGHTS, rows=rows, columns=columns, records=True)

    def _pair_of(self, codes: Tensor, scales: Tensor, columns: bool) -> QuantizedPair:
        factors = 1.0 / scales
        factors = factors.view(()) if factors.numel() == 1 and self.scaling.weight_block == (0, 0) else factors[0]
        transposed = None
        if columns:
            values = self.settings.kernels.weights.transposed_codes(codes[None], 1)
            transposed = Quantized(values, factors.t().contiguous())
        return QuantizedPair(Quantized(codes, factors), transposed)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Fp8Linear,
        group: Group,
        gathers: bool,
        records: bool,
    ) -> Tensor:
        whole = gather_rows(inputs, group) if gathers else inputs
        keeps_fp8 = records and ctx.needs_input_grad[1] and layer.settings.wgrad and not gathers
        quantized = layer.scaling.quantize(whole, Role.INPUTS, rows=True, columns=keeps_fp8, records=records)
        assert quantized.rows is not None
        weights = layer.weight_rows(weight)
        output = layer.settings.kernels.product(quantized.rows, weights, inputs.dtype, precise=False)  # [t, out]
        if bias is not None:
            output += bias
        if quantized.columns is not None:
            ctx.save_for_backward(quantized.columns.values, quantized.columns.factors)
        else:
            ctx.save_for_backward(inputs)
        ctx.keeps_fp8 = keeps_fp8
        # Keeps the parameter, not a saved tensor: full sharding frees its storage and gathers it again before backward.
        ctx.weight, ctx.layer, ctx.group, ctx.gathers = weight, layer, group, gathers
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, rows: Tensor) -> tuple[Tensor | None, ...]:
        layer, weight, group, saved = ctx.layer, ctx.weight, ctx.group, ctx.saved_tensors
        settings, multiply = layer.settings, layer.settings.kernels.product
        needs_inputs, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gathered = None
        if ctx.gathers and needs_weight and not defers_weight_grad(weight):
            gathered = start_gather_rows(saved[0], group)
        quantized = QuantizedPair(None, None)
        if needs_inputs or (needs_weight and settings.wgrad):
            wants_columns = needs_weight and settings.wgrad
            quantized = layer.scaling.quantize(
                rows, Role.GRADIENTS, rows=needs_inputs, columns=wants_columns, records=True
            )
        summed = None
        if needs_inputs:
            gradient = multiply(quantized.rows, layer.weight_columns(weight), rows.dtype)  # [t, in]
            start = start_reduce_scatter_rows if ctx.gathers else start_all_reduce
            summed = start(gradient, group)
        weight_gradient = bias_gradient = None
        if needs_weight:
            kept: Any = gathered.wait() if gathered is not None else None
            if kept is None and not ctx.keeps_fp8:
                kept = saved[0].detach()
                kept = SequenceShard(kept, group) if ctx.gathers else kept
            if quantized.columns is None:
                weight_gradient = add_weight_gradient(weight, rows, kept)
            else:
                factors = saved[1] if ctx.keeps_fp8 else None
                add = partial(_add_product, layer, quantized.columns.factors, factors)
                right = saved[0] if ctx.keeps_fp8 else kept
                main_grad = main_grad_accumulator(weight)
                if main_grad is None:
                    weight_gradient = add(None, quantized.columns.values, right).to(weight.dtype)
                else:
                    main_grad.add_grouped_product(quantized.columns.values, right, add)
        if needs_bias:
            bias_gradient = layer.add_rows(rows)
        inputs_gradient = None if summed is None else summed.wait()
        return inputs_gradient, weight_gradient, bias_gradient, None, None, None, None


def _add_product(
    layer: Fp8Linear,
    gradient_factors: Tensor,
    input_factors: Tensor | None,
    total: Tensor | None,
    gradients: Tensor,
    inputs: Tensor,
    factor: float = 1.0,
) -> Tensor:
    """Adds `factor` times gradients inputs^T, [out, t] x [in, t], to `total`, accumulated in its type.
    Without `input_factors` the inputs are not quantised yet, [t, in]."""
    if input_factors is None:
        pair = layer.scaling.quantize(inputs, Role.INPUTS, rows=False, columns=True, records=False)
        assert pair.columns is not None
        quantized = pair.columns
    else:
        quantized = Quantized(inputs, input_factors, layer.scaling.block)
    kernels = layer.settings.kernels
    given = gradient_factors if factor == 1.0 else gradient_factors.float() * factor
    left = Quantized(gradients, given, layer.scaling.block)
    if total is None:
        return kernels.product(left, quantized, torch.float32)
    kernels.accumulate_product(total, left, quantized)
    return total
