"""Newton-Schulz iterations on Gram matrices are those on the matrices themselves."""

import pytest
import torch
from torch import Tensor

from megatron.core.optimizer.gram_newton_schulz import Scales, gram_newton_schulz
from megatron.core.optimizer.newton_schulz import newton_schulz, norms, polynomials


def symmetric_product(
    left: Tensor, right: Tensor, alpha: float = 1.0, added: Tensor | None = None, beta: float = 0.0, gamma: float = 0.0
) -> Tensor:
    product = alpha * left @ right.mT
    torch.testing.assert_close(product, product.mT, rtol=0, atol=1e-9 * float(product.abs().max()))
    if added is None:
        return product
    return product + beta * added + gamma * torch.eye(product.shape[-1], dtype=product.dtype)


@pytest.mark.parametrize("shape", [(2, 12, 30), (1, 16, 16), (2, 30, 12)])
@pytest.mark.parametrize(
    ("coefficients", "steps"), [("simple", 5), ("quintic", 1), ("quintic", 5), ("polar_express", 8)]
)
def test_equal_to_the_iteration_on_matrices(coefficients: str, steps: int, shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = 0.5 * newton_schulz(matrices, steps, coefficients)
    scales = Scales(matrix=32.0, gram=8.0)
    x = scales.matrix * matrices / norms(matrices, coefficients)
    found = gram_newton_schulz(x, polynomials(steps, coefficients), symmetric_product, 0.5, scales)
    assert (found - expected).abs().max() < 1e-11
