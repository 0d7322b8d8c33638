"""Merging of the results of attention blocks on a GPU, in one pass over the outputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.attention.blocks import merge_block
from megatron.core.ops.tiles import cdiv, next_power_of_2

_ROWS = 16
"""Queries of one head that one program merges."""


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    total, total_lse, output, lse, rows, heads, width,
    total_row, total_batch, total_head, total_lse_batch, total_lse_head,
    output_row, output_batch, output_head, lse_batch, lse_head, lse_row,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    valid = row < rows
    old_at = total_lse + batch * total_lse_batch + head * total_lse_head + row
    old = tl.load(old_at, mask=valid, other=0.0)
    new = tl.load(lse + batch * lse_batch + head * lse_head + row * lse_row, mask=valid, other=0.0)
    top = tl.maximum(tl.maximum(old, new), -3.0e38)  # if both are -inf, the weights are 0, not NaN
    old_weight, new_weight = tl.exp(old - top), tl.exp(new - top)
    weight = old_weight + new_weight
    share = tl.where(weight > 0.0, 1.0 / tl.maximum(weight, 1.0e-37), 0.0)
    inside = valid[:, None] & (column < width)[None, :]
    total_at = total + batch * total_batch + head * total_head + row[:, None] * total_row + column[None, :]
    output_at = output + batch * output_batch + head * output_head + row[:, None] * output_row + column[None, :]
    merged = tl.load(total_at, mask=inside, other=0.0) * (old_weight * share)[:, None]
    merged += tl.load(output_at, mask=inside, other=0.0).to(tl.float32) * (new_weight * share)[:, None]
    tl.store(total_at, merged, mask=inside)
    tl.store(old_at, tl.where(weight > 0.0, top + tl.log(weight), old), mask=valid)


def merge_block_triton(total: Tensor, total_lse: Tensor, output: Tensor, lse: Tensor) -> None:
    """Computes `blocks.merge_block` with a Triton kernel. Float64 uses the reference."""
    if total.dtype is not torch.float32:
        merge_block(total, total_lse, output, lse)
        return
    s, b, a, width = total.shape
    output = output if output.stride(3) == 1 else output.contiguous()
    assert total.stride(3) == 1 and total_lse.stride(2) == 1
    _merge_kernel[(cdiv(s, _ROWS), b * a)](
        total, total_lse, output, lse, s, a, width,
        *total.stride()[:3], *total_lse.stride()[:2], *output.stride()[:3], *lse.stride(),
        ROWS=_ROWS, WIDTH=next_power_of_2(width),
    )  # fmt: skip
