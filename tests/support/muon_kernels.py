"""Compares Muon's kernels with their definitions in float64. Runs in Triton's interpreter or on a GPU."""

import contextlib
import itertools
from unittest import mock

import torch
from torch import Tensor

from megatron.core.ops.symmetric_product_triton import symmetric_product_triton
from megatron.core.optimizer import muon_triton
from megatron.core.optimizer.gram_newton_schulz import Directions, newton_schulz_in_float16
from megatron.core.optimizer.muon_matrices import Runs
from megatron.core.optimizer.muon_triton import product_in_two_parts, update_momentum_triton, update_weights_triton
from megatron.core.optimizer.newton_schulz import newton_schulz
from megatron.core.optimizer.segments import StepInputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"

_SHAPES = ((1, 20, 70), (2, 48, 48))
"""Shapes of matrices. `matrices_of_several_shapes` has a tall one, and the interpreter is slow."""
if ON_GPU:  # the last two are for the kernel with specialised warps
    _SHAPES = ((1, 64, 160), (2, 48, 48), (1, 200, 60), (2, 256, 384), (1, 320, 128))
_FEW_PARTS = contextlib.nullcontext() if ON_GPU else mock.patch.object(muon_triton, "_PARTS", 4)
"""The interpreter runs a program for each part of a sum of squares, also for those without an element."""


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def symmetric_products() -> None:
    """Gram matrices and polynomials of them; sizes that fill tiles, and sizes that do not; views; several matrices."""
    large = ((2, 300, 40), (2, 256, 192), (1, 384, 64)) if ON_GPU else ((1, 300, 40), (1, 256, 64))
    for n, size, inner in ((1, 16, 16), (2, 48, 100), (1, 130, 70), *large):
        matrices = _random(n, size, 2 * inner).half()[..., :inner]
        wide = matrices.double()
        for stored in (matrices, matrices.mT.contiguous().mT, matrices.contiguous()):
            rest = torch.full((n, size, size), torch.nan, dtype=torch.float16, device=DEVICE)
            gram = symmetric_product_triton(stored, stored, 0.125, low=rest)
            _agree(gram, 0.125 * wide @ wide.mT)
            _agree(gram.double() + rest, 0.125 * wide @ wide.mT, 1e-5)
            assert torch.equal(gram, symmetric_product_triton(stored, stored, 0.125))
        made, low = torch.empty_like(gram), torch.full_like(gram, torch.nan)
        symmetric_product_triton(gram, gram, 0.5, gram, -2.0, 3.0, made, low)
        exact = gram.double()
        polynomial = 0.5 * exact @ exact - 2.0 * exact + 3.0 * torch.eye(size, device=DEVICE)
        _agree(made, polynomial)
        _agree(made.double() + low, polynomial, 1e-5)
        assert torch.equal(made, made.mT) and torch.equal(low, low.mT)


def products_in_two_parts() -> None:
    """The two parts of a product together have the bits of float32's sums, also those of the second factor's."""
    for n, size in ((1, 16), (2, 48), *(((2, 256),) if ON_GPU else ())):
        left, whole = _random(n, size, size).half(), _random(n, size, size + 1)[..., 1:]
        high = whole.half()
        rest = (whole - high).half()
        product, low = product_in_two_parts(left, high, rest)
        expected = left.double() @ (high.double() + rest.double())
        _agree(product, expected)
        _agree(product.double() + low, expected, 1e-5)


def _agree(found: Tensor, expected: Tensor, limit: float = 4e-4) -> None:
    """Results are rounded to 11 bits."""
    assert (found.double() - expected).norm() <= limit * expected.norm()


def orthogonal_matrices() -> None:
    """Wide, square and tall matrices; singular values that fall by six orders of magnitude."""
    with _FEW_PARTS:
        for shape in _SHAPES:
            _orthogonal(shape)


def _orthogonal(shape: tuple[int, ...]) -> None:
    matrices = _random(*shape)
    rows, values, columns = torch.linalg.svd(matrices.double(), full_matrices=False)
    spiked = rows * torch.logspace(0, -6, values.shape[-1], device=DEVICE) @ columns
    for given, limit in ((matrices, 1e-2), (spiked.float(), 5e-2)):
        for coefficients in ("simple", "quintic"):
            expected = newton_schulz(given.double(), 5, coefficients)
            found = newton_schulz_in_float16([([Directions(given)], 2.0)], 5, coefficients)[0] / 2.0
            error = (found.double() - expected).norm() / expected.norm()
            assert error <= limit, (shape, coefficients, float(error))


def matrices_of_several_shapes() -> None:
    """Shapes with equal shorter sides are one batch, each with a factor of its own, and are given in parts; a matrix of
    zeros, and one whose squares are below float32's range for all but the first of its numbers."""
    wide, tall = _random(3, 48, 100), _random(1, 5000 if ON_GPU else 90, 48)
    wide[1], wide[2] = 0.0, 1e-21
    wide[2, 0, 0] = 1.0
    parts = [Directions(wide[:1]), Directions(wide[1:])]
    with _FEW_PARTS:
        made = newton_schulz_in_float16([(parts, 1.0), ([Directions(tall)], 3.0)], 5, "quintic")
    for given, found, factor in ((wide, made[0], 1.0), (tall, made[1], 3.0)):
        expected = factor * newton_schulz(given.double(), 5, "quintic")
        assert (found.double() - expected).norm() <= 1e-2 * expected.norm()


def updates() -> None:
    """Momentum and weights, with every setting; a step that is skipped changes neither."""
    scalar = torch.tensor(0.1, dtype=torch.float64, device=DEVICE)
    for skips, decay, nesterov, decoupled in itertools.product((False, True), (0.1, scalar), *2 * [(False, True)]):
        momentum, gradient, weights = _random(3000), _random(3001)[:3000], _random(3002)[:3000]
        made, moved, rounded = momentum.clone(), weights.clone(), torch.zeros_like(weights, dtype=torch.bfloat16)
        numbers = (torch.tensor(number, dtype=torch.float64, device=DEVICE) for number in (1.0, 3.0, 0.01))
        count, divisor, lr = numbers
        step = StepInputs(count.float(), divisor, torch.tensor(skips, device=DEVICE))
        settings = {"beta": 0.9, "nesterov": nesterov, "decoupled": decoupled}
        with _FEW_PARTS:
            direction, _ = update_momentum_triton(made, gradient, weights, step, decay, **settings)
        pulled = gradient.double() / 3.0 + (0.0 if decoupled else 0.1 * weights.double())
        averaged = 0.9 * momentum.double() + 0.1 * pulled
        expected = 0.9 * averaged + 0.1 * pulled if nesterov else averaged
        torch.testing.assert_close(direction.double(), expected, rtol=1e-6, atol=1e-6)
        update = direction.half()
        update_weights_triton(moved, rounded, update, step, lr, decay, decoupled)
        kept = weights.double() * (1.0 - 0.001) if decoupled else weights.double()
        if skips:
            assert torch.equal(made, momentum) and torch.equal(moved, weights) and not rounded.any()
        else:
            torch.testing.assert_close(made.double(), averaged, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(moved.double(), kept - 0.01 * update.double(), rtol=1e-6, atol=1e-6)
            assert ((rounded.float() - moved).abs() <= 2**-7 * moved.abs()).all()  # the interpreter truncates


def updates_of_runs() -> None:
    """Matrices with gaps between their runs, and several matrices: only their elements change, as they do alone."""
    for runs in (Runs(1, 70, 3, 140, 350), Runs(1, 0, 2, 4100, 4200), Runs(3, 0, 3, 1500, 1500)):
        size = max(runs.first + runs.count * runs.stride, 1050)
        at = runs.first + runs.stride * torch.arange(runs.count)[:, None] + torch.arange(runs.length)
        at = at.flatten().to(DEVICE)
        momentum, gradient, weights = _random(size), _random(size + 1)[1:], _random(size + 2)[2:]
        number = torch.tensor(2.0, dtype=torch.float64, device=DEVICE)
        step = StepInputs(number.float(), number, torch.tensor(False, device=DEVICE))
        settings = {"beta": 0.9, "nesterov": True, "decoupled": False}
        made, alone = momentum.clone(), momentum[at]
        with _FEW_PARTS:
            direction, squares = update_momentum_triton(made, gradient, weights, step, 0.1, **settings, runs=runs)
            expected, _ = update_momentum_triton(alone, gradient[at], weights[at], step, 0.1, **settings)
        assert torch.equal(direction, expected) and torch.equal(made, momentum.index_copy(0, at, alone))
        sums = direction.double().view(runs.matrices, -1).square().sum(1)
        torch.testing.assert_close(squares.double().sum(1), sums, rtol=1e-5, atol=0)
        moved, rounded = weights.clone(), torch.zeros_like(weights, dtype=torch.bfloat16)
        part, narrow = weights[at], rounded[at]
        update = direction.half()
        update_weights_triton(moved, rounded, update, step, 0.01 * number, 0.1, True, runs)
        update_weights_triton(part, narrow, update, step, 0.01 * number, 0.1, True)
        assert torch.equal(moved, weights.index_copy(0, at, part))
        assert torch.equal(rounded, torch.zeros_like(rounded).index_copy(0, at, narrow))
