"""Newton-Schulz iterations: compute the nearest orthogonal matrices of many matrices of one shape, using only
products."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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

_EPS = 1e-7
_MARGIN = {"polar_express": 1.01}
"""Safety margin: a matrix is divided by its norm times this factor, so that rounding cannot raise a singular value
above 1."""


def newton_schulz(matrices: Tensor, steps: int, coefficients: str = "quintic", precision: str = "high") -> Tensor:
    """Returns matrices [n, rows, columns] with the same singular vectors, and singular values near 1.

    X_0 = G / |G|;  A = X X^T;  X = a X + (b A + c A A) X. Tall matrices are transposed first. `precision` of the
    products of float32 matrices: low keeps everything in bfloat16; medium rounds the factors to bfloat16; high keeps
    float32. Float64 matrices stay in float64. On a GPU low and medium are `gram_newton_schulz` with factors in float16,
    which have three more bits than bfloat16's.
    """
    if matrices.is_cuda and precision != "high" and matrices.dtype is not torch.float64:
        return newton_schulz_in_float16(matrices, steps, coefficients)
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    main = x.dtype
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) * _MARGIN.get(coefficients, 1.0) + _EPS)
    is_wide_type = main is torch.float64
    if precision == "low" and not is_wide_type:
        x = x.bfloat16()
    rounds = precision == "medium" and not is_wide_type
    chosen = COEFFICIENTS[coefficients]
    for step in range(steps):
        a, b, c = chosen[min(step, len(chosen) - 1)]
        gram = _product(x, x.mT, rounds)
        x = a * x + _product(b * gram + c * _product(gram, gram, rounds), x, rounds)
    x = x.to(main)
    return x if wide else x.mT


@dataclass(frozen=True)
class GramScales:
    """Powers of two that keep numbers within the range of float16."""

    matrix: float = 1.0
    """Matrices are kept times this."""
    gram: float = 1.0
    """Gram matrices are kept times this."""


_RESTART = 2
"""Steps after which the Gram matrix is computed anew. Rounding its entries changes small eigenvalues, and each step
raises them 16-fold; restarts from the matrices themselves undo that."""


def gram_newton_schulz(
    x: Tensor,
    polynomials: Sequence[tuple[float, float, float]],
    symmetric_product: Callable[..., Tensor],
    scales: GramScales = GramScales(),
) -> Tensor:
    """Returns what the iteration above makes of X_0 [n, rows, columns], with fewer operations: R = X X^T determines the
    polynomial of each step, and X is a polynomial of R times X_0.

    P = a I + b R + c R^2;  Q = Q P;  R = P R P;  in the end X = Q X_0. All factors are polynomials of one symmetric
    matrix, so they commute, and their products are symmetric. Every second step X is computed, and R from it.
    """
    alpha, scale = scales.gram / scales.matrix**2, scales.gram
    restarts = range(_RESTART, len(polynomials) - 1, _RESTART)
    q: Tensor | None = None
    gram = symmetric_product(x, x, alpha)
    for step, (a, b, c) in enumerate(polynomials):
        if step in restarts:
            assert q is not None
            x, q = torch.bmm(q, x), None
            gram = symmetric_product(x, x, alpha)
        p = symmetric_product(gram, gram, c / scale**2, gram, b / scale, a)
        q = p if q is None else symmetric_product(q, p)
        if step + 1 < len(polynomials) and step + 1 not in restarts:
            gram = symmetric_product(symmetric_product(p, gram), p)
    return x if q is None else torch.bmm(q, x)


def newton_schulz_in_float16(matrices: Tensor, steps: int, coefficients: str) -> Tensor:
    from megatron.core.optimizer.muon_triton import symmetric_product_triton

    chosen = COEFFICIENTS[coefficients]
    polynomials = [chosen[min(step, len(chosen) - 1)] for step in range(steps)]
    x = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    scales = GramScales(min(2.0 ** math.ceil(math.log2(x.shape[-2] * x.shape[-1]) / 2), 32768.0), 4096.0)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) * _MARGIN.get(coefficients, 1.0) + _EPS
    x = gram_newton_schulz((x * (scales.matrix / norm)).half(), polynomials, symmetric_product_triton, scales)
    x = x if matrices.shape[-2] <= matrices.shape[-1] else x.mT
    return x.to(matrices.dtype) / scales.matrix


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
