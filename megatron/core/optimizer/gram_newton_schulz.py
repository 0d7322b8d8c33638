"""Newton-Schulz iterations on Gram matrices: the polynomials of `newton_schulz`, with fewer operations."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.optimizer.newton_schulz import margin, polynomials

_RESTART = 2
"""Steps after which the Gram matrix is computed anew from the matrices. A rounded Gram matrix has wrong small
eigenvalues, and each step raises them 16-fold. Without a restart, singular values come out as large as 4."""


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape."""

    x: Tensor
    """[n, rows, columns], times `scale`."""
    scale: float = 1.0
    """A power of two that keeps numbers within the range of float16."""
    factor: float = 1.0
    """Factor of the results."""

    @property
    def is_tall(self) -> bool:
        """Whether the Gram matrix is X^T X, which is smaller than X X^T."""
        return self.x.shape[-2] > self.x.shape[-1]


def gram_newton_schulz(
    batches: Sequence[Batch],
    steps: Sequence[tuple[float, float, float]],
    symmetric_product: Callable[..., Tensor],
    gram_scale: float = 1.0,
) -> list[Tensor]:
    """Returns for each batch its factor times what `newton_schulz` makes of its matrices X_0, for the polynomials of
    its steps. The shorter sides of all matrices are equal, so their Gram matrices are one batch.

    R = X X^T determines the polynomial of each step, and all X are polynomials of R times X_0:

        P = a I + b R + c R^2;  Q = Q P;  R = P R P;  in the end X = Q X_0

    P, Q and R commute, so their products are symmetric. Every second step computes X, and R from it. Tall matrices use
    X^T X. Gram matrices are kept times `gram_scale`, a power of two.
    `symmetric_product(left, right, alpha, added, beta, gamma, output)` returns alpha left @ right^T + beta added +
    gamma I.
    """
    restarts = range(_RESTART, len(steps) - 1, _RESTART)
    gram = q = _grams(batches, symmetric_product, gram_scale)
    for step, (a, b, c) in enumerate(steps):
        if step in restarts:
            made = _applied(q, batches, [1.0] * len(batches))
            batches = [replace(batch, x=x) for batch, x in zip(batches, made, strict=True)]
            gram = _grams(batches, symmetric_product, gram_scale)
        p = symmetric_product(gram, gram, c / gram_scale**2, gram, b / gram_scale, a)
        q = p if step == 0 or step in restarts else symmetric_product(q, p)
        if step + 1 < len(steps) and step + 1 not in restarts:
            gram = symmetric_product(symmetric_product(p, gram), p)
    return _applied(q, batches, [batch.factor / batch.scale for batch in batches])


def _grams(batches: Sequence[Batch], symmetric_product: Callable[..., Tensor], gram_scale: float) -> Tensor:
    """Returns the Gram matrices of all batches, times `gram_scale`."""
    sizes, size = [len(batch.x) for batch in batches], min(batches[0].x.shape[-2:])
    grams = batches[0].x.new_empty(sum(sizes), size, size)
    for batch, output in zip(batches, grams.split(sizes), strict=True):
        side = batch.x.mT if batch.is_tall else batch.x
        symmetric_product(side, side, gram_scale / batch.scale**2, output=output)
    return grams


def _applied(q: Tensor, batches: Sequence[Batch], factors: Sequence[float]) -> list[Tensor]:
    """Returns Q X of each batch times its factor."""
    found = []
    for batch, part, factor in zip(batches, q.split([len(batch.x) for batch in batches]), factors, strict=True):
        left, right = (batch.x, part) if batch.is_tall else (part, batch.x)
        found.append(torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0.0, alpha=factor))
    return found


def newton_schulz_in_float16(
    batches: Sequence[tuple[Sequence[Tensor], float]], steps: int, coefficients: str
) -> list[Tensor]:
    """Returns for each batch its factor times the results of `newton_schulz`, as one tensor [n, rows, columns] in
    float16, for float32 matrices on a GPU that are given in parts of the first dimension. The shorter sides of all
    matrices are equal. Sums are in float32, all else is in float16, which has three more bits than bfloat16."""
    from megatron.core.ops.symmetric_product_triton import symmetric_product_triton

    rounded = (_rounded(parts, factor, coefficients) for parts, factor in batches)
    return gram_newton_schulz([*rounded], polynomials(steps, coefficients), symmetric_product_triton, 2.0**12)


def _rounded(parts: Sequence[Tensor], factor: float, coefficients: str) -> Batch:
    """Returns the matrices of a batch, divided by their norms, in float16."""
    from megatron.core.optimizer.muon_triton import round_normalized

    rows, columns = parts[0].shape[-2:]
    scale = min(2.0 ** round(math.log2(rows * columns) / 2), 2.0**15)
    x = parts[0].new_empty(sum(len(part) for part in parts), rows, columns, dtype=torch.float16)
    for part, output in zip(parts, x.split([len(part) for part in parts]), strict=True):
        round_normalized(part, output, scale, margin(coefficients))
    return Batch(x, scale, factor)
