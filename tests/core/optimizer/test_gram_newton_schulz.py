"""Newton-Schulz iterations on Gram matrices are those on the matrices themselves."""

import pytest
import torch
from torch import Tensor

from megatron.core.optimizer.gram_newton_schulz import Batch, gram_newton_schulz
from megatron.core.optimizer.newton_schulz import newton_schulz, norms, polynomials


def symmetric_product(
    left: Tensor,
    right: Tensor,
    alpha: float = 1.0,
    added: Tensor | None = None,
    beta: float = 0.0,
    gamma: float = 0.0,
    output: Tensor | None = None,
) -> Tensor:
    product = alpha * left @ right.mT
    torch.testing.assert_close(product, product.mT, rtol=0, atol=1e-9 * float(product.abs().max()))
    if output is not None:
        output.copy_(product)
    if added is None:
        return product
    return product + beta * added + gamma * torch.eye(product.shape[-1], dtype=product.dtype)


@pytest.mark.parametrize("shapes", [[(2, 12, 30), (1, 40, 12)], [(1, 16, 16)]])
@pytest.mark.parametrize(
    ("coefficients", "steps"), [("simple", 5), ("quintic", 1), ("quintic", 5), ("polar_express", 8)]
)
def test_equal_to_the_iteration_on_matrices(coefficients: str, steps: int, shapes: list[tuple[int, int, int]]) -> None:
    """Wide and tall matrices whose shorter sides are equal are one batch."""
    given = [torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) for shape in shapes]
    batches = [
        Batch(scale * matrices / norms(matrices, coefficients), scale, factor)
        for matrices, scale, factor in zip(given, (32.0, 16.0), (0.5, 3.0), strict=False)
    ]
    found = gram_newton_schulz(batches, polynomials(steps, coefficients), symmetric_product, 8.0)
    for matrices, made, batch in zip(given, found, batches, strict=True):
        expected = batch.factor * newton_schulz(matrices, steps, coefficients)
        assert (made - expected).abs().max() < 1e-11
