"""Newton-Schulz iterations on Gram matrices: the polynomials of `newton_schulz`, with fewer operations."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.optimizer.newton_schulz import margin, polynomials

_RESTART = 2
"""Steps after which the Gram matrix is computed anew. A rounded Gram matrix has wrong small eigenvalues, and each step
raises them 16-fold. Without a restart, singular values come out as large as 4."""

_LONG = 2.5
"""Ratio of the sides n < m of a matrix from which a restart without the matrix costs fewer operations: 7 n^3 in place
of 3 n^2 m. Multiplications and additions are counted apart. In square matrices a restart costs as much as a step
without one, 3 n^3."""


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape."""

    x: Tensor
    """[n, rows, columns], times `scale`."""
    scale: float = 1.0
    """A power of two that keeps numbers within the range of float16."""
    factor: float = 1.0
    """Factor of the results."""


@dataclass(frozen=True)
class Directions:
    """Matrices to orthogonalise."""

    values: Tensor
    """[n, rows, columns], in float32."""
    squares: Tensor | None = None
    """[n, parts]: sums of the squares of parts of each matrix, if they are known."""


@dataclass(frozen=True)
class Products:
    """How matrices [n, ...] are multiplied."""

    symmetric: Callable[..., Tensor]
    """`symmetric(left, right, alpha, added, beta, gamma, output, low)` returns alpha left @ right^T + beta added +
    gamma I, which is symmetric, and writes what its rounding left out into `low`."""
    in_two_parts: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """`in_two_parts(left, high, low)` returns left @ (high + low), rounded, and what the rounding left out."""


@dataclass
class _Stack:
    """The matrices X of a batch while they are iterated."""

    x: Tensor
    scale: float
    place: slice
    """Where its matrices are among the Gram matrices of all batches."""
    low: Tensor | None = None
    """What rounding left out of the Gram matrices of `x`, if the next restart needs it."""
    before: Tensor | None = None
    """The polynomial of the steps before the last restart, if it is not in `x` yet."""

    @property
    def is_tall(self) -> bool:
        """Whether the Gram matrix is X^T X, which is smaller than X X^T."""
        return self.x.shape[-2] > self.x.shape[-1]

    def write_gram(self, grams: Tensor, products: Products, gram_scale: float, restarts: bool) -> None:
        """Writes the Gram matrices of `x`, times `gram_scale`. `restarts`: a restart follows."""
        side, output = self.x.mT if self.is_tall else self.x, grams[self.place]
        self.low = torch.empty_like(output) if restarts and _is_long(*self.x.shape[-2:]) else None
        products.symmetric(side, side, gram_scale / self.scale**2, output=output, low=self.low)

    def restart(
        self, grams: Tensor, q: Tensor, growth: float, products: Products, gram_scale: float, restarts: bool
    ) -> None:
        """Replaces the Gram matrices of X by those of Q X, for polynomials Q with the value `growth` at 0."""
        if self.low is None:
            self.x = self.applied(q, 1.0)
            self.before = None
            self.write_gram(grams, products, gram_scale, restarts)
            return
        high, low = products.in_two_parts(q[self.place], grams[self.place], self.low)
        products.symmetric(high, q[self.place], 1.0, low, growth, output=grams[self.place])
        self.low, self.before = None, q[self.place]

    def applied(self, q: Tensor, factor: float) -> Tensor:
        """Returns Q X times a factor, with the polynomial of the steps before the last restart."""
        part = q[self.place]
        if self.before is not None:
            part = torch.bmm(self.before, part) if self.is_tall else torch.bmm(part, self.before)
        left, right = (self.x, part) if self.is_tall else (part, self.x)
        return torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0.0, alpha=factor)


def gram_newton_schulz(
    batches: Sequence[Batch],
    steps: Sequence[tuple[float, float, float]],
    products: Products,
    gram_scale: float = 1.0,
) -> list[Tensor]:
    """Returns for each batch its factor times what `newton_schulz` makes of its matrices X_0, for the polynomials of
    its steps. The shorter sides of all matrices are equal, so their Gram matrices are one batch.

    R = X X^T determines the polynomial of each step, and all X are polynomials of R times X_0:

        P = a I + b R + c R^2;  Q = Q P;  R = P R P;  in the end X = Q X_0

    P, Q and R commute, so their products are symmetric. Every second step starts again from X = Q X and R = X X^T; for
    long matrices every other time from R = Q R Q, for the R where the block began. That R and Q R are kept in two
    parts, the rounded numbers and what rounding left out. The left-out part of Q R is multiplied by Q(0) in place of
    Q: only small eigenvalues need it. Square matrices start again in every step, which costs them nothing. Tall
    matrices use X^T X. Gram matrices are kept times `gram_scale`, a power of two.
    """
    found: dict[int, Tensor] = {}
    for square in (True, False):
        numbers = [number for number, batch in enumerate(batches) if (batch.x.shape[-2] == batch.x.shape[-1]) == square]
        if numbers:
            chosen = [batches[number] for number in numbers]
            found.update(zip(numbers, _iterated(chosen, steps, products, gram_scale), strict=True))
    return [found[number] for number in range(len(batches))]


def _iterated(
    batches: Sequence[Batch], steps: Sequence[tuple[float, float, float]], products: Products, gram_scale: float
) -> list[Tensor]:
    """Returns `gram_newton_schulz` of batches that start again in the same steps."""
    restarts = _restarts(len(steps), *batches[0].x.shape[-2:])
    sizes, size = [len(batch.x) for batch in batches], min(batches[0].x.shape[-2:])
    origin = gram = q = batches[0].x.new_empty(sum(sizes), size, size)
    stacks = []
    for batch, stop in zip(batches, itertools.accumulate(sizes), strict=True):
        stacks.append(_Stack(batch.x, batch.scale, slice(stop - len(batch.x), stop)))
        stacks[-1].write_gram(origin, products, gram_scale, restarts=bool(restarts))
    growth = 1.0
    for step, (a, b, c) in enumerate(steps):
        if step in restarts:
            for stack in stacks:
                stack.restart(origin, q, growth, products, gram_scale, restarts=step != restarts[-1])
            gram = origin
        p = products.symmetric(gram, gram, c / gram_scale**2, gram, b / gram_scale, a)
        q, growth = (p, a) if step == 0 or step in restarts else (products.symmetric(q, p), growth * a)
        if step + 1 < len(steps) and step + 1 not in restarts:
            gram = products.symmetric(products.symmetric(p, gram), p)
    return [stack.applied(q, batch.factor / batch.scale) for stack, batch in zip(stacks, batches, strict=True)]


def _restarts(steps: int, rows: int, columns: int) -> range:
    """Returns the steps in which a matrix starts again. The last block may have three steps, because fewer follow it,
    but not the first."""
    if rows == columns:
        return range(1, steps)
    return range(_RESTART, 3 if steps == 3 else steps - 1, _RESTART)


def _is_long(rows: int, columns: int) -> bool:
    """Returns whether every other restart of a matrix is computed without it."""
    return max(rows, columns) >= _LONG * min(rows, columns)


def operations(rows: int, columns: int, steps: int) -> float:
    """Returns how many multiplications and additions the steps of a matrix take, counted apart. Of a symmetric product
    half is computed."""
    small, large = sorted((rows, columns))
    restarts = len(_restarts(steps, rows, columns))
    inside = steps - 1 - restarts  # steps that do not begin a block
    without = (restarts + 1) // 2 if _is_long(rows, columns) else 0
    cubes = steps + 3 * inside + 7 * without
    return small**2 * (cubes * small + 3.0 * (1 + restarts - without) * large)


def newton_schulz_in_float16(
    batches: Sequence[tuple[Sequence[Directions], float]], steps: int, coefficients: str
) -> list[Tensor]:
    """Returns for each batch its factor times the results of `newton_schulz`, as one tensor [n, rows, columns] in
    float16, for matrices on a GPU that are given in parts of the first dimension. The shorter sides of all matrices are
    equal. Sums are in float32, all else is in float16, which has three more bits than bfloat16."""
    from megatron.core.ops.symmetric_product_triton import symmetric_product_triton
    from megatron.core.optimizer.muon_triton import product_in_two_parts

    rounded = [_rounded(parts, factor, coefficients) for parts, factor in batches]
    products = Products(symmetric_product_triton, product_in_two_parts)
    return gram_newton_schulz(rounded, polynomials(steps, coefficients), products, 2.0**12)


def _rounded(parts: Sequence[Directions], factor: float, coefficients: str) -> Batch:
    """Returns the matrices of a batch, divided by their norms, in float16."""
    from megatron.core.optimizer.muon_triton import round_normalized

    first, sizes = parts[0].values, [len(part.values) for part in parts]
    rows, columns = first.shape[-2:]
    scale = min(2.0 ** round(math.log2(rows * columns) / 2), 2.0**15)
    x = first.new_empty(sum(sizes), rows, columns, dtype=torch.float16)
    for part, output in zip(parts, x.split(sizes), strict=True):
        round_normalized(part.values, output, scale, margin(coefficients), part.squares)
    return Batch(x, scale, factor)
