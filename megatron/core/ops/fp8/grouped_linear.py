"""The grouped linear layer of experts with products in fp8: y = x W_e^T for the rows of each expert e.

As in `fp8.linear`, a weight is rounded once for all micro-batches of a step, and its gradient is added to the main
gradient in float32.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.fp8.block_recipes import build_scaling
from megatron.core.ops.fp8.formats import BLOCK
from megatron.core.ops.fp8.grouped import QuantizedGroups, QuantizedGroupsPair, Segments
from megatron.core.ops.fp8.linear import QuantizedWeights
from megatron.core.ops.fp8.micro_batches import MicroBatches
from megatron.core.ops.fp8.recipes import Fp8Settings, LinearSplit, Role, Scaling
from megatron.core.ops.moe.grouped_linear import RowGroups, add_grouped_product
from megatron.core.utils.autograd_context import AutogradContext


class Fp8GroupedLinear(QuantizedWeights[QuantizedGroupsPair]):
    """The products of one linear layer of all experts of a rank, with its scales and its quantised weights. Called like
    `ops.moe.grouped_linear.grouped_linear`."""

    scaling: Scaling

    def __init__(
        self,
        settings: Fp8Settings,
        split: LinearSplit,
        weight: Tensor,
        micro_batches: MicroBatches | None = None,
    ) -> None:
        """`weight` [experts, out, in] gives the sizes and the device. Raises UserError for sizes that do not divide by
        16."""
        super().__init__(settings, weight)
        self.scaling = build_scaling(settings, split, weight.device, micro_batches)

    def forward(self, inputs: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        """Returns inputs [n, in] times the transposed weight of each row's group [groups, out, in]: [n, out]."""
        return _Fp8GroupedLinear.apply(inputs, weight, groups, self, torch.is_grad_enabled())

    def _quantize(self, weight: Tensor, rows: bool, columns: bool) -> QuantizedGroupsPair:
        segments = Segments.of_weight(weight.detach())
        matrix = weight.detach().reshape(-1, weight.shape[-1])
        return self.scaling.quantize(matrix, Role.WEIGHTS, segments, rows=rows, columns=columns, records=True)

    def _pair_of(self, codes: Tensor, scales: Tensor, columns: bool) -> QuantizedGroupsPair:
        matrix, factors = codes.reshape(-1, codes.shape[-1]), 1.0 / scales
        scope: Literal["all", "segments", "squares"] = "all"
        if factors.dim():
            scope = "segments" if self.scaling.weight_block == (0, 0) else "squares"
            factors = factors.flatten() if scope == "segments" else factors.flatten(0, 1)
        transposed = None
        if columns:
            values = self.settings.kernels.weights.transposed_codes(codes, BLOCK)
            transposed = QuantizedGroups(values, factors.t().contiguous(), scope)
        return QuantizedGroupsPair(QuantizedGroups(matrix, factors, scope), transposed)


class _Fp8GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, inputs: Tensor, weight: Tensor, groups: RowGroups, layer: Fp8GroupedLinear, records: bool
    ) -> Tensor:
        segments = Segments.of_rows(groups, inputs.shape[0])
        keeps_fp8 = records and ctx.needs_input_grad[1] and layer.settings.wgrad
        quantized = layer.scaling.quantize(inputs, Role.INPUTS, segments, rows=True, columns=keeps_fp8, records=records)
        multiply = layer.settings.kernels.grouped.product
        output: Tensor = multiply(
            quantized.rows, layer.weight_rows(weight), segments, inputs.dtype, transposed=False, precise=False
        )
        columns = quantized.columns
        ctx.scope = None if columns is None else columns.scope
        ctx.save_for_backward(*((inputs,) if columns is None else (columns.values, columns.factors)))
        # Keeps the parameter, not a saved tensor: full sharding frees its storage and gathers it again before backward.
        ctx.weight, ctx.segments, ctx.groups, ctx.layer = weight, segments, groups, layer
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer, weight, segments = ctx.layer, ctx.weight, ctx.segments
        kernels = layer.settings.kernels.grouped
        needs_inputs, needs_weight, *_ = ctx.needs_input_grad
        gradient = gradient.contiguous()
        quantized = QuantizedGroupsPair(None, None)
        if needs_inputs or ctx.scope is not None:
            quantized = layer.scaling.quantize(
                gradient, Role.GRADIENTS, segments, rows=needs_inputs, columns=ctx.scope is not None, records=True
            )
        inputs_gradient = weight_gradient = None
        if needs_inputs:
            inputs_gradient = kernels.product(
                quantized.rows, layer.weight_columns(weight), segments, gradient.dtype, transposed=True
            )
        if needs_weight:
            add: Any
            if ctx.scope is not None:
                values, factors = ctx.saved_tensors
                assert quantized.columns is not None
                given, own = (quantized.columns.factors, quantized.columns.scope), (factors, ctx.scope)
                add = partial(_add_product, layer, segments, given, own)
                left, right = quantized.columns.values, values
            else:
                add = partial(kernels.accumulate_rows, groups=ctx.groups)
                left, right = gradient, ctx.saved_tensors[0].detach()
            weight_gradient = add_grouped_product(weight, left, right, add)
        return inputs_gradient, weight_gradient, None, None, None


def _add_product(
    layer: Fp8GroupedLinear,
    segments: Segments,
    gradient_factors: tuple[Tensor, Any],
    input_factors: tuple[Tensor, Any],
    total: Tensor,
    gradients: Tensor,
    inputs: Tensor,
    factor: float = 1.0,
) -> None:
    """Adds `factor` times gradients inputs^T of each group, [out, padded rows] x [in, padded rows], to `total`."""
    (factors, scope), block = gradient_factors, layer.scaling.block
    layer.settings.kernels.grouped.accumulate(
        total,
        QuantizedGroups(gradients, factors if factor == 1.0 else factors.float() * factor, scope, block),
        QuantizedGroups(inputs, *input_factors, block),
        segments,
    )
