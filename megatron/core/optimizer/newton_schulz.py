"""Newton-Schulz iterations: compute the nearest orthogonal matrices of many matrices of one shape, using only
products."""

import math

import torch
from torch import Tensor

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
}
"""Coefficients (a, b, c) of p(x) = a x + b x^3 + c x^5 for each step; the last are repeated.

simple: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; quintic: one polynomial per step,
as in the modded-nanogpt speed runs; polar_express: Amsel et al. 2025, arXiv:2505.16932.
"""

EPS = 1e-7
"""Added to the norm of a matrix before the matrix is divided by it."""
_MARGIN = {"polar_express": 1.01}
"""Safety margin: a matrix is divided by its norm times this factor, so that rounding cannot raise a singular value
above 1."""


def newton_schulz(matrices: Tensor, steps: int, coefficients: str = "quintic", precision: str = "high") -> Tensor:
    """Returns matrices [n, rows, columns] with the same singular vectors, and singular values near 1.

    X_0 = G / |G|;  A = X X^T;  X = a X + (b A + c A A) X. Tall matrices are transposed first. `precision` of the
    products of float32 matrices: low keeps everything in bfloat16; medium rounds the factors to bfloat16; high keeps
    float32. Float64 matrices stay in float64.
    """
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    main = x.dtype
    x = x / norms(x, coefficients)
    is_wide_type = main is torch.float64
    if precision == "low" and not is_wide_type:
        x = x.bfloat16()
    rounds = precision == "medium" and not is_wide_type
    for a, b, c in polynomials(steps, coefficients):
        gram = _product(x, x.mT, rounds)
        x = a * x + _product(b * gram + c * _product(gram, gram, rounds), x, rounds)
    x = x.to(main)
    return x if wide else x.mT


def norms(matrices: Tensor, coefficients: str) -> Tensor:
    """Returns what each matrix is divided by, [n, 1, 1], so that no singular value is above 1."""
    return torch.linalg.matrix_norm(matrices, keepdim=True) * margin(coefficients) + EPS


def margin(coefficients: str) -> float:
    """Returns the factor of the norm by which a matrix is divided."""
    return _MARGIN.get(coefficients, 1.0)


def polynomials(steps: int, coefficients: str) -> list[tuple[float, float, float]]:
    """Returns (a, b, c) of each step."""
    chosen = COEFFICIENTS[coefficients]
    return [chosen[min(step, len(chosen) - 1)] for step in range(steps)]


def _product(left: Tensor, right: Tensor, rounds: bool) -> Tensor:
    if not rounds:
        return torch.bmm(left, right)
    left, right = left.bfloat16(), right.bfloat16()
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def update_scale(rows: int, columns: int, mode: str) -> float:
    """Returns the factor of the orthogonal update of a matrix [rows, columns] (outputs, inputs).

    spectral: sqrt(max(rows, columns)), which with an extra factor of 0.2 gives updates of AdamW's size (Liu et al.
    2025, arXiv:2502.16982); unit_rms_norm: sqrt(rows / columns); shape_scaling: sqrt(max(1, rows / columns)).
    """
    return {
        "spectral": math.sqrt(max(rows, columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
        "shape_scaling": math.sqrt(max(1.0, rows / columns)),
    }[mode]
