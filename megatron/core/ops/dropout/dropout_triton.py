"""Dropout on a GPU: masks, and bias + dropout + residual in one kernel. Backward draws the mask again.

The kernels draw the same bits as `dropout.keep_rows`: Triton's Philox is the same function as `counter_rng.philox`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.dropout.dropout import Draw, DropoutRngPosition, bias_dropout_add
from megatron.core.ops.dropout.keep_bits_triton import keep_columns
from megatron.core.ops.sum_rows_triton import sum_rows_triton
from megatron.core.ops.tiles import cdiv, next_power_of_2
from megatron.core.utils.autograd_context import AutogradContext

_BLOCKS = 256
"""Philox blocks, of four elements each, that one program draws."""
_GROUPS = 32
"""Groups of 32 elements of attention masks that one program draws."""


@triton.jit
def _words(seed, row, block, iteration, extra):  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    """Returns the words of Philox blocks, in order: block 0's four, block 1's four, ..."""
    zero = tl.zeros_like(block)
    w0, w1, w2, w3 = tl.philox(
        seed,
        (row + zero).to(tl.uint32),
        block.to(tl.uint32),
        (iteration + zero).to(tl.uint32),
        (extra + zero).to(tl.uint32),
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def _keep_rows_kernel(  # type: ignore[no-untyped-def]
    kept, row, extra, first, iteration, count, seed, threshold, BLOCKS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    start = tl.load(first + i)
    number = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    words = _words(seed, tl.load(row + i), (start >> 2) + number, tl.load(iteration), tl.load(extra + i))
    element = tl.program_id(1) * BLOCKS * 4 + tl.arange(0, BLOCKS * 4) - (start & 3)
    inside = (element >= 0) & (element < count)
    tl.store(kept + i * count + element, words.to(tl.int64) >= threshold, mask=inside)


@triton.jit
def _keep_columns_kernel(  # type: ignore[no-untyped-def]
    kept, row, extra, first, iteration, count, key_0, key_1, threshold, GROUPS: tl.constexpr
):
    """Draws numbers of 16 bits for groups of 32 elements."""
    i = tl.program_id(0).to(tl.int64)
    start = tl.load(first + i)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    found = keep_columns(
        tl.load(row + i).to(tl.uint32), ((start >> 5) + group).to(tl.uint32) * 4, tl.load(iteration).to(tl.uint32),
        tl.load(extra + i).to(tl.uint32), key_0.to(tl.uint32), key_1.to(tl.uint32), threshold.to(tl.uint32),
    )  # fmt: skip
    lane = tl.arange(0, 32)
    element = group[:, None] * 32 + lane[None, :] - (start & 31)
    bits = (found[:, None] >> lane[None, :].to(tl.uint32)) & 1
    tl.store(kept + i * count + element, bits.to(tl.int1), mask=(element >= 0) & (element < count))


def keep_rows_triton(draw: Draw, row: Tensor, extra: Tensor, first: Tensor, count: int) -> Tensor:
    """Computes `dropout.keep_rows` for tensors on a GPU."""
    kept = torch.empty((row.shape[0], count), dtype=torch.bool, device=row.device)
    if draw.bits == 16:
        _keep_columns_kernel[(row.shape[0], cdiv(count + 31, 32 * _GROUPS))](
            kept, row.contiguous(), extra.contiguous(), first.contiguous(), draw.iteration, count, *draw.key,
            draw.threshold, GROUPS=_GROUPS,
        )  # fmt: skip
        return kept
    grid = (row.shape[0], cdiv(count + 3, 4 * _BLOCKS))
    _keep_rows_kernel[grid](
        kept, row.contiguous(), extra.contiguous(), first.contiguous(), draw.iteration, count, _seed(draw),
        draw.threshold, BLOCKS=_BLOCKS,
    )  # fmt: skip
    return kept


@triton.jit
def _apply_kernel(  # type: ignore[no-untyped-def]
    output, inputs, bias, residual, token, iteration, width, seed, threshold, scale,
    DROPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCKS * 4 + tl.arange(0, BLOCKS * 4)
    inside = channel < width
    value = tl.load(inputs + i * width + channel, mask=inside).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + channel, mask=inside).to(tl.float32)
    if DROPS:
        position = tl.load(token + i)
        number = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        words = _words(seed, position, number, tl.load(iteration), position >> 32)
        value = tl.where(words.to(tl.int64) >= threshold, value * scale, 0.0)
    if HAS_RESIDUAL:
        value += tl.load(residual + i * width + channel, mask=inside).to(tl.float32)
    tl.store(output + i * width + channel, value.to(output.dtype.element_ty), mask=inside)


def bias_dropout_add_triton(
    inputs: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    probability: float,
    position: DropoutRngPosition | None,
) -> Tensor:
    """Computes `dropout.bias_dropout_add` in one kernel. Float64, and sums without a bias that drop nothing, use the
    reference."""
    drops = position is not None and probability > 0.0
    exact = torch.float64 in (inputs.dtype, None if residual is None else residual.dtype)
    if inputs.dtype is torch.float64 or (not drops and (exact or bias is None)):
        return bias_dropout_add(inputs, bias, residual, probability, position)
    return _BiasDropoutAdd.apply(inputs, bias, residual, probability, position if drops else None)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        inputs: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        probability: float,
        position: DropoutRngPosition | None,
    ) -> Tensor:
        ctx.position, ctx.probability = position, probability
        ctx.types = tuple(None if tensor is None else tensor.dtype for tensor in (inputs, bias, residual))
        output_type = inputs.dtype if residual is None else torch.promote_types(inputs.dtype, residual.dtype)
        return _apply(inputs, bias, residual, position, probability, output_type)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Any, ...]:
        inputs_type, bias_type, residual_type = ctx.types
        inputs_gradient = output_gradient
        if ctx.position is not None:
            inputs_gradient = _apply(output_gradient, None, None, ctx.position, ctx.probability, inputs_type)
        bias_gradient = sum_rows_triton(inputs_gradient, bias_type) if ctx.needs_input_grad[1] else None
        residual_gradient = output_gradient.to(residual_type) if ctx.needs_input_grad[2] else None
        return inputs_gradient.to(inputs_type), bias_gradient, residual_gradient, None, None


def _apply(
    inputs: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    position: DropoutRngPosition | None,
    probability: float,
    output_type: torch.dtype,
) -> Tensor:
    """Returns the sum, [t, h]. Without a position nothing is dropped."""
    rows, width = inputs.shape
    output = torch.empty((rows, width), dtype=output_type, device=inputs.device)
    blocks = min(_BLOCKS, next_power_of_2(cdiv(width, 4)))
    drawn: tuple[Any, ...] = (None, None, width, 0, 0, 1.0)
    if position is not None:
        draw = position.draw(probability)
        drawn = position.tokens.index, draw.iteration, width, _seed(draw), draw.threshold, draw.scale
    if output.numel():
        _apply_kernel[(rows, cdiv(width, 4 * blocks))](
            output, inputs.contiguous(), bias, None if residual is None else residual.contiguous(), *drawn,
            DROPS=position is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, BLOCKS=blocks,
        )  # fmt: skip
    return output


def _seed(draw: Draw) -> int:
    """Returns the key in the form of Triton's Philox: one signed 64-bit integer, low word first."""
    seed = draw.key[0] | draw.key[1] << 32
    return seed - 2**64 if seed >= 2**63 else seed
