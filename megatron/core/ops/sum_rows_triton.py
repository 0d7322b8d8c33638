"""Sums over rows on a GPU, for the gradients of biases and norm weights: in float32, in the same order in every run."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.tiles import cdiv

_ROWS = 64
"""Rows that a program adds up at once."""
_COLUMNS = 64
"""Columns of one program."""
_PROGRAMS = 8
"""Programs for each multiprocessor."""
_MANY_ROWS = 1024
"""From this number of rows on, several programs share a block of columns."""


@triton.jit
def _sum_rows_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    totals, rows, count, width, rows_per_program, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    end = tl.minimum((part + 1) * rows_per_program, count)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(part * rows_per_program, end, ROWS):
        row = first + tl.arange(0, ROWS)
        valid = (row < end)[:, None] & (column < width)[None, :]
        at = rows + row.to(tl.int64)[:, None] * width + column[None, :]
        total += tl.load(at, mask=valid, other=0.0).to(tl.float32)
    at = totals + part.to(tl.int64) * width + column
    tl.store(at, tl.sum(total, 0).to(totals.dtype.element_ty), mask=column < width)


def sum_rows_triton(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the sum of `rows` [n, width] over the first dimension, [width]. It is accumulated in float32 and rounded
    once to `dtype` (default: the rows' type). If either type is float64, torch computes the sum in float64."""
    dtype = dtype or rows.dtype
    if torch.float64 in (rows.dtype, dtype):
        return rows.sum(0, dtype=dtype)
    rows = rows.contiguous()
    count, width = rows.shape
    parts = 1
    if count >= _MANY_ROWS:
        programs = _PROGRAMS * num_multiprocessors(rows.device)
        parts = max(1, min(programs // cdiv(width, _COLUMNS), count // (8 * _ROWS)))
    if parts > 1:
        partial = torch.empty(parts, width, dtype=torch.float32, device=rows.device)
        _launch(partial, rows, parts)
        rows = partial
    total = torch.empty(1, width, dtype=dtype, device=rows.device)
    _launch(total, rows, 1)
    return total[0]


def _launch(totals: Tensor, rows: Tensor, parts: int) -> None:
    count, width = rows.shape
    per_program = cdiv(cdiv(count, parts), _ROWS) * _ROWS
    columns = _COLUMNS if parts > 1 else 32  # a final sum has few blocks: more programs with fewer columns each
    grid = (cdiv(width, columns), parts)
    _sum_rows_kernel[grid](totals, rows, count, width, per_program, ROWS=_ROWS if parts > 1 else 128, COLUMNS=columns)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU; for a CPU, where Triton's interpreter runs the programs, 2."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
