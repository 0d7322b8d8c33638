"""The gradient of an embedding on a GPU: rows of equal index are summed in a fixed order and added to the table.

The rows are sorted by index and cut into parts of 32 rows, one per program, so many programs share the work of a
frequent token. A program that has all rows of an index adds their sum to the table. Other sums are partial: the program
stores them, and a second kernel adds them in the order of the parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.tiles import cdiv, next_power_of_2

_ROWS = 32
"""Sorted rows of a part."""
_COLUMNS = 512
"""Columns of one program."""
_PARTS = 16
"""Partial sums that are read at once."""


@triton.jit
def _add_parts_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    table, first_sums, last_sums, rows, index, order, count, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    begin, end = part * ROWS, tl.minimum((part + 1) * ROWS, count)
    before = tl.load(index + begin - 1, mask=begin > 0, other=-1)
    after = tl.load(index + end, mask=end < count, other=-1)
    first = tl.load(index + begin)
    total = tl.zeros((COLUMNS,), WIDE)
    mine = first
    value = tl.load(rows + tl.load(order + begin) * width + column, mask=inside, other=0.0)
    for i in range(begin, end):
        total += value.to(WIDE)
        # Loads the next row before the sum may be stored, so that the load is not delayed.
        following = tl.load(index + i + 1, mask=i + 1 < end, other=-1)
        row = tl.load(order + tl.minimum(i + 1, end - 1))
        value = tl.load(rows + row * width + column, mask=inside, other=0.0)
        if mine != following:  # the last row of this index in the part
            from_before = (mine == first) & (mine == before)
            continues = (i + 1 == end) & (mine == after)
            if from_before:
                tl.store(first_sums + part.to(tl.int64) * width + column, total, mask=inside)
            elif continues:
                tl.store(last_sums + part.to(tl.int64) * width + column, total, mask=inside)
            else:
                at = table + mine.to(tl.int64) * width + column
                total += tl.load(at, mask=inside, other=0.0).to(WIDE)
                tl.store(at, total.to(table.dtype.element_ty), mask=inside)
            total = tl.zeros((COLUMNS,), WIDE)
        mine = following


@triton.jit
def _add_partial_sums_kernel(  # type: ignore[no-untyped-def]
    table, first_sums, last_sums, index, count, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    end = (part + 1) * ROWS
    if end < count:
        mine = tl.load(index + end - 1)
        starts_here = True
        if tl.load(index + part * ROWS) == mine:
            starts_here = tl.load(index + part * ROWS - 1, mask=part > 0, other=-1) != mine
        if starts_here & (tl.load(index + end) == mine):
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            inside = column < width
            total = tl.load(last_sums + part.to(tl.int64) * width + column, mask=inside, other=0.0)
            group = part + 1
            continues = True
            while continues:
                # A part continues the sum if its first index is the same.
                others = group + tl.arange(0, PARTS)
                same = tl.load(index + others * ROWS, mask=others * ROWS < count, other=-1) == mine
                at = first_sums + others.to(tl.int64)[:, None] * width + column[None, :]
                total += tl.sum(tl.load(at, mask=same[:, None] & inside[None, :], other=0.0), 0)
                continues = tl.sum(same.to(tl.int32), 0) == PARTS
                group += PARTS
            at = table + mine.to(tl.int64) * width + column
            total += tl.load(at, mask=inside, other=0.0).to(WIDE)
            tl.store(at, total.to(table.dtype.element_ty), mask=inside)


def accumulate_rows_triton(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """Computes `embedding.accumulate_rows`; bit-equal in every run. Sums are in float32 (float64 if the table or the
    rows are) and are rounded once to the table's type."""
    count, width = rows.shape
    if not rows.numel():
        return
    rows = rows.detach().contiguous()
    index, order = index.to(torch.int32).sort(stable=True)
    double = torch.float64 in (table.dtype, rows.dtype)
    parts = cdiv(count, _ROWS)
    sums = torch.empty(2, parts, width, dtype=torch.float64 if double else torch.float32, device=rows.device)
    columns = min(_COLUMNS, next_power_of_2(width))
    wide = tl.float64 if double else tl.float32
    _add_parts_kernel[(parts, cdiv(width, columns))](
        table, sums[0], sums[1], rows, index, order, count, width, ROWS=_ROWS, COLUMNS=columns, WIDE=wide
    )
    if parts > 1:
        columns = min(64, columns)
        _add_partial_sums_kernel[(parts, cdiv(width, columns))](
            table, sums[0], sums[1], index, count, width, ROWS=_ROWS, COLUMNS=columns, PARTS=_PARTS, WIDE=wide
        )
