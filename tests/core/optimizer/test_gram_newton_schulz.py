"""Newton-Schulz iterations on Gram matrices are those on the matrices themselves."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.core.optimizer.gram_newton_schulz import Batch, Products, gram_newton_schulz, operations
from megatron.core.optimizer.newton_schulz import newton_schulz, norms, polynomials


def products_in(kept: torch.dtype, checks: bool = False) -> Products:
    """Returns products whose results are rounded to a type. `checks`: symmetric ones must be symmetric."""

    def rounded(exact: Tensor) -> tuple[Tensor, Tensor]:
        high = exact.to(kept).to(exact)
        return high, (exact - high).to(kept).to(exact)

    def symmetric(
        left: Tensor,
        right: Tensor,
        alpha: float = 1.0,
        added: Tensor | None = None,
        beta: float = 0.0,
        gamma: float = 0.0,
        output: Tensor | None = None,
        low: Tensor | None = None,
    ) -> Tensor:
        product = alpha * left @ right.mT
        if checks:
            torch.testing.assert_close(product, product.mT, rtol=0, atol=1e-9 * float(product.abs().max()))
        if added is not None:
            product = product + beta * added + gamma * torch.eye(product.shape[-1], dtype=product.dtype)
        product = product.tril() + product.tril(-1).mT
        high, rest = rounded(product)
        if low is not None:
            low.copy_(rest)
        return high if output is None else output.copy_(high)

    return Products(symmetric, lambda left, high, low: rounded(left @ high + rounded(left @ low)[0]))


@pytest.mark.parametrize("shapes", [[(2, 12, 30), (1, 12, 12), (1, 40, 12), (2, 12, 20)], [(1, 16, 16)]])
@pytest.mark.parametrize(
    ("coefficients", "steps"),
    [("simple", 5), ("quintic", 1), ("quintic", 2), ("quintic", 3), ("quintic", 5), ("polar_express", 8)],
)
def test_equal_to_the_iteration_on_matrices(coefficients: str, steps: int, shapes: list[tuple[int, int, int]]) -> None:
    """Long and short, wide and tall matrices whose shorter sides are equal are one batch."""
    given = [torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) for shape in shapes]
    batches = [
        Batch(scale * matrices / norms(matrices, coefficients), scale, factor)
        for matrices, scale, factor in zip(given, (32.0, 16.0, 8.0, 4.0), (0.5, 3.0, 1.0, 2.0), strict=False)
    ]
    found = gram_newton_schulz(batches, polynomials(steps, coefficients), products_in(torch.float64, True), 8.0)
    for matrices, made, batch in zip(given, found, batches, strict=True):
        expected = batch.factor * newton_schulz(matrices, steps, coefficients)
        assert (made - expected).abs().max() < 1e-11


def test_what_rounding_leaves_out_is_used() -> None:
    """With Gram matrices in float32 and what that leaves out, a restart without the matrices is as good as float64:
    small singular values have the error of float32, not 16 times as much for each step."""
    matrices = _matrices("falls fast", 24, 96).double()[None]
    batch = Batch(matrices / norms(matrices, "quintic"))
    (made,) = gram_newton_schulz([batch], polynomials(5, "quintic"), products_in(torch.float32), 1.0)
    (alone,) = gram_newton_schulz([batch], polynomials(5, "quintic"), _forgets(products_in(torch.float32)), 1.0)
    expected = newton_schulz(matrices, 5, "quintic")
    assert (made - expected).norm() < 0.2 * (alone - expected).norm()


def _forgets(products: Products) -> Products:
    def in_two_parts(left: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        made, rest = products.in_two_parts(left, high, torch.zeros_like(low))
        return made, torch.zeros_like(rest)

    return Products(products.symmetric, in_two_parts)


def _matrices(kind: str, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(rows, columns, generator=generator)
    index = torch.arange(1, rows + 1, dtype=torch.float64)
    spectra = {"falls slowly": 1 / index, "falls fast": index**-2.0, "six decades": torch.logspace(0, -6, rows)}
    if kind in spectra:
        left, _, right = torch.linalg.svd(normal.double(), full_matrices=False)
        return ((left * spectra[kind]) @ right).float()
    few = torch.randn(rows, 4, generator=generator) @ torch.randn(4, columns, generator=generator)
    made: dict[str, Callable[[], Tensor]] = {
        "normal": lambda: normal,
        "four directions and noise": lambda: few + 0.1 * normal,
        "four directions and little noise": lambda: few + 1e-3 * normal,
        "rows of zeros": lambda: normal * (torch.arange(rows) % 3 > 0)[:, None],
        "one direction": lambda: few[:, :1] * few[:1],
        "a large mean": lambda: 1.0 + 1e-3 * normal,
        "columns of all sizes": lambda: normal * torch.logspace(0, -3, columns),
    }
    return made[kind]()


KINDS = (
    "normal", "four directions and noise", "four directions and little noise", "rows of zeros", "one direction",
    "a large mean", "columns of all sizes", "falls slowly", "falls fast", "six decades",
)  # fmt: skip


@pytest.mark.parametrize("shape", [(96, 336), (48, 336), (64, 64)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("coefficients", "steps"),
    [("simple", 5), ("quintic", 3), ("quintic", 5), ("quintic", 6), ("polar_express", 5), ("polar_express", 8)],
)
def test_float16_is_closer_than_bfloat16_on_matrices(
    coefficients: str, steps: int, kind: str, shape: tuple[int, int]
) -> None:
    """All results rounded to float16, as on a GPU, against the iteration on matrices in bfloat16. No singular value is
    larger than in float64 by more than a tenth."""
    given = _matrices(kind, *shape)[None]
    scale = 2.0 ** round(math.log2(given.numel()) / 2)
    x = (scale * given / norms(given.double(), coefficients)).half().double()
    products = products_in(torch.float16)
    (made,) = gram_newton_schulz([Batch(x, scale)], polynomials(steps, coefficients), products, 2.0**12)
    expected = newton_schulz(given.double(), steps, coefficients)
    rough = newton_schulz(given, steps, coefficients, "low").double()
    assert (made - expected).norm() <= (rough - expected).norm().nan_to_num(torch.inf)
    largest = torch.linalg.matrix_norm(expected, 2)
    assert torch.linalg.matrix_norm(made, 2) <= 1.1 * largest


def test_operations_are_counted() -> None:
    """For matrices n x m, halves of symmetric products counted: 6 m/n + 14 times n^3, and 3 m/n + 21 if m is long."""
    assert operations(64, 64, 5) == 20 * 64**3
    assert operations(128, 64, 5) == (6 * 2 + 14) * 64**3
    assert operations(64, 448, 5) == operations(448, 64, 5) == (3 * 7 + 21) * 64**3
    assert operations(64, 448, 1) == (3 * 7 + 1) * 64**3
