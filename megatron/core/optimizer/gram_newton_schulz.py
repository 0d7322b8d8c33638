"""Newton-Schulz iterations on Gram matrices: the polynomials of `newton_schulz`, with fewer operations."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.optimizer.newton_schulz import norms, polynomials

_RESTART = 2
"""Steps after which the Gram matrix is computed anew from the matrices. A rounded Gram matrix has wrong small
eigenvalues, and each step raises them 16-fold. Without a restart, singular values come out as large as 4."""


@dataclass(frozen=True)
class Scales:
    """Powers of two that keep numbers within the range of float16."""

    matrix: float = 1.0
    """Matrices are kept times this."""
    gram: float = 1.0
    """Gram matrices are kept times this."""


def gram_newton_schulz(
    x: Tensor,
    steps: Sequence[tuple[float, float, float]],
    symmetric_product: Callable[..., Tensor],
    factor: float = 1.0,
    scales: Scales = Scales(),
) -> Tensor:
    """Returns `factor` times what `newton_schulz` makes of X_0 [n, rows, columns], for the polynomials of its steps.

    R = X X^T determines the polynomial of each step, and all X are polynomials of R times X_0:

        P = a I + b R + c R^2;  Q = Q P;  R = P R P;  in the end X = Q X_0

    P, Q and R commute, so their products are symmetric. Every second step computes X, and R from it. Tall matrices use
    X^T X. `symmetric_product(left, right, alpha, added, beta, gamma)` returns alpha left @ right^T + beta added +
    gamma I.
    """
    tall = x.shape[-2] > x.shape[-1]
    restarts = range(_RESTART, len(steps) - 1, _RESTART)

    def gram_of(x: Tensor) -> Tensor:
        side = x.mT if tall else x
        return symmetric_product(side, side, scales.gram / scales.matrix**2)

    gram, q = gram_of(x), None
    for step, (a, b, c) in enumerate(steps):
        if step in restarts:
            x = _applied(q, x, tall, 1.0)
            gram, q = gram_of(x), None
        p = symmetric_product(gram, gram, c / scales.gram**2, gram, b / scales.gram, a)
        q = p if q is None else symmetric_product(q, p)
        if step + 1 < len(steps) and step + 1 not in restarts:
            gram = symmetric_product(symmetric_product(p, gram), p)
    return _applied(q, x, tall, factor / scales.matrix)


def _applied(q: Tensor | None, x: Tensor, tall: bool, factor: float) -> Tensor:
    if q is None:
        return factor * x
    left, right = (x, q) if tall else (q, x)
    return torch.baddbmm(x.new_empty(1, 1, 1), left, right, beta=0.0, alpha=factor)


def newton_schulz_in_float16(parts: Sequence[Tensor], steps: int, coefficients: str, factor: float = 1.0) -> Tensor:
    """Returns `factor` times the results of `newton_schulz`, as one tensor [n, rows, columns] in float16, for matrices
    on a GPU that are given in parts of the first dimension. Sums are in float32, all else is in float16, which has
    three more bits than bfloat16."""
    from megatron.core.ops.symmetric_product_triton import symmetric_product_triton

    rows, columns = parts[0].shape[-2:]
    scales = Scales(matrix=min(2.0 ** round(math.log2(rows * columns) / 2), 2.0**15), gram=2.0**12)
    x = parts[0].new_empty(sum(len(part) for part in parts), rows, columns, dtype=torch.float16)
    for part, to in zip(parts, x.split([len(part) for part in parts]), strict=True):
        torch.mul(part, scales.matrix / norms(part, coefficients), out=to)
    return gram_newton_schulz(x, polynomials(steps, coefficients), symmetric_product_triton, factor, scales)
