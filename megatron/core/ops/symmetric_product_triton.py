"""Products of matrices whose result is symmetric, computed from its lower triangle."""

import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.gluon import gluon_kernel
from megatron.core.ops.tiles import cdiv, next_power_of_2


@triton.jit
def _symmetric_product_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    output, low, left, right, added, size, inner, left_n, left_row, left_k, right_n, right_row, right_k,
    alpha, beta, gamma, ADDS: tl.constexpr, LOW: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Computes a tile [ROWS, ROWS] of the lower triangle, and writes it and its mirror image."""
    pair, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # Tiles of the triangle are numbered by rows: row i has i + 1 of them.
    i = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > pair, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= pair, i + 1, i)
    j = pair - i * (i + 1) // 2
    row, column = i * ROWS + tl.arange(0, ROWS), j * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, INNER)
    left_at = left + n * left_n + row[:, None].to(tl.int64) * left_row + k[None, :] * left_k
    right_at = right + n * right_n + column[None, :].to(tl.int64) * right_row + k[:, None] * right_k
    total = tl.zeros((ROWS, ROWS), tl.float32)
    for begin in range(0, inner, INNER):
        inside = begin + k < inner
        a = tl.load(left_at, mask=(row < size)[:, None] & inside[None, :], other=0.0)
        b = tl.load(right_at, mask=(column < size)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total)
        left_at += INNER * left_k
        right_at += INNER * right_k
    total *= alpha
    present = (row < size)[:, None] & (column < size)[None, :]
    at = n * size * size + row[:, None].to(tl.int64) * size + column[None, :]
    if ADDS:
        total += beta * tl.load(added + at, mask=present, other=0.0).to(tl.float32)
        total += tl.where(row[:, None] == column[None, :], gamma, 0.0)
    result = total.to(output.dtype.element_ty)
    mirrored = n * size * size + column[:, None].to(tl.int64) * size + row[None, :]
    below = present & (row[:, None] >= column[None, :])
    above = (column < size)[:, None] & (row < size)[None, :] & (column[:, None] < row[None, :])
    tl.store(output + at, result, mask=below)
    tl.store(output + mirrored, tl.trans(result), mask=above)
    if LOW:
        rest = (total - result.to(tl.float32)).to(output.dtype.element_ty)
        tl.store(low + at, rest, mask=below)
        tl.store(low + mirrored, tl.trans(rest), mask=above)


def symmetric_product_triton(
    left: Tensor,
    right: Tensor,
    alpha: float = 1.0,
    added: Tensor | None = None,
    beta: float = 0.0,
    gamma: float = 0.0,
    output: Tensor | None = None,
    low: Tensor | None = None,
) -> Tensor:
    """Returns alpha left @ right^T + beta added + gamma I for [n, r, k] matrices whose product is symmetric, computed
    from its lower triangle: half the work of a product. Of `added` the lower triangle is read. Sums are in float32.
    `output`, if given, is a contiguous tensor for the result, and `low` one for what its rounding left out."""
    n, size, inner = left.shape
    output = left.new_empty(n, size, size) if output is None else output
    specialized = gluon_kernel("symmetric_product_specialized_triton")
    if specialized is not None and left.is_cuda and specialized.takes(left, right):
        specialized.symmetric_product_specialized(output, low, left, right, alpha, added, beta, gamma)
        return output
    rows = 128 if size >= 128 else max(16, next_power_of_2(size))
    tiles = cdiv(size, rows)
    _symmetric_product_kernel[(tiles * (tiles + 1) // 2, n)](
        output, output if low is None else low, left, right, output if added is None else added, size, inner,
        *left.stride(), *right.stride(), alpha, beta, gamma,
        ADDS=added is not None, LOW=low is not None, ROWS=rows, INNER=64, num_warps=8, num_stages=4,
    )  # fmt: skip
    return output
