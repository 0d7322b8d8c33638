"""Newton-Schulz iterations: what they do to singular values and leave of singular vectors."""

import pytest
import torch

from megatron.core.optimizer.newton_schulz import COEFFICIENTS, newton_schulz, update_scale


@pytest.mark.parametrize("shape", [(3, 4, 6), (2, 7, 3), (1, 1, 5)])
@pytest.mark.parametrize(("name", "steps"), [("simple", 5), ("quintic", 5), ("polar_express", 8)])
def test_singular_values_become_one_and_vectors_stay(name: str, steps: int, shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    in_basis = u.mT @ newton_schulz(matrices, steps, name) @ v.mT
    values = in_basis.diagonal(dim1=-2, dim2=-1)
    assert ((values > 0.6) & (values < 1.3)).all()
    assert (in_basis - torch.diag_embed(values)).abs().max() < 1e-12
    if name == "polar_express":  # these polynomials converge
        assert (values - 1.0).abs().max() < 1e-6


def test_a_step_is_its_polynomial_of_the_singular_values() -> None:
    size = torch.tensor([0.6, 0.8], dtype=torch.float64)  # norm 1
    found = newton_schulz(torch.diag(size)[None], 1, "simple").diagonal(dim1=-2, dim2=-1)[0]
    a, b, c = COEFFICIENTS["simple"][0]
    assert torch.allclose(found, a * size + b * size**3 + c * size**5, rtol=1e-6)


@pytest.mark.parametrize(("precision", "tolerance"), [("high", 1e-4), ("medium", 0.1), ("low", 0.15)])
def test_precision(precision: str, tolerance: float) -> None:
    matrices = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    exact = newton_schulz(matrices.double(), 5)
    found = newton_schulz(matrices, 5, "quintic", precision)
    error = ((found - exact).norm() / exact.norm()).item()
    assert found.dtype is torch.float32 and error < tolerance and (error > 1e-3) == (precision != "high")


def test_scales() -> None:
    assert update_scale(8, 2, "spectral") == 8**0.5 and update_scale(2, 8, "spectral") == 8**0.5
    assert update_scale(8, 2, "unit_rms_norm") == 2.0 and update_scale(2, 8, "unit_rms_norm") == 0.5
    assert update_scale(8, 2, "shape_scaling") == 2.0 and update_scale(2, 8, "shape_scaling") == 1.0
