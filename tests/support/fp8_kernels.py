"""Checks that compare the kernels of fp8 quantisation with their definitions, bit for bit. They run in Triton's
interpreter or on a GPU."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.activation import Activation, gelu_tanh
from megatron.core.ops.fp8 import quantize
from megatron.core.ops.fp8.formats import scale_for
from megatron.core.ops.fp8.quantize_triton import (
    cast_scaled_triton,
    largest_value_triton,
    quantize_blocks_triton,
    quantize_by_largest_triton,
)
from megatron.core.ops.moe.permute import ChoiceNumbers
from megatron.core.ops.moe.permute_triton import permute_triton, unpermute_triton
from megatron.core.ops.moe.weighted_activation_triton import weighted_activation_triton
from megatron.core.ops.norm_triton import layer_norm_with_residual_triton, rms_norm_with_residual_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SHAPES = ((48, 80), (130, 257), (1, 16))


def matrix(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers whose rows and columns have different sizes."""
    generator = torch.Generator().manual_seed(m)
    spread = torch.exp2(torch.arange(m)[:, None] % 7 - torch.arange(k) % 5.0)
    return (torch.randn(m, k, generator=generator) * spread).to(DEVICE, dtype)


def same_bits(ours: Tensor | None, exact: Tensor | None, what: object) -> None:
    """Compares bits of fp8. Triton's interpreter rounds ties and subnormal numbers otherwise than a GPU, by one step,
    and gives half of a value that is rounded up to a power of two; only a GPU is held to every bit."""
    assert (ours is None) == (exact is None), what
    if ours is None or exact is None:
        return
    assert ours.shape == exact.shape and ours.dtype is exact.dtype, what
    differ = ours.view(torch.uint8) != exact.view(torch.uint8)
    if DEVICE.type == "cpu":
        step = (ours.view(torch.uint8).int() - exact.view(torch.uint8).int()).abs() == 1
        differ &= ~(step | (ours.float() * 2 == exact.float()))
    assert not differ.any(), (what, int(differ.sum()))


def largest_values() -> None:
    for shape, dtype in itertools.product(SHAPES, (torch.bfloat16, torch.float32)):
        x = matrix(*shape, dtype=dtype)
        assert torch.equal(largest_value_triton(x), quantize.largest_value(x))


def noted_values() -> None:
    """Checks the largest values that norms and activations note of their results and of the gradients they compute."""
    weight = matrix(1, 48)[0]
    for what, width, function in (
        ("rms", 48, lambda x: rms_norm_with_residual_triton(x, weight, 1e-5, False, True)),
        ("layer", 48, lambda x: layer_norm_with_residual_triton(x, weight, weight, 1e-5, False, True)),
        ("gated", 2080, lambda x: (weighted_activation_triton(x, None, None, Activation(F.silu, True), True),)),
        ("plain", 1100, lambda x: (weighted_activation_triton(x, None, None, Activation(gelu_tanh), True),)),
    ):
        found: list[Tensor] = []
        inputs = matrix(5, width).requires_grad_() * 1
        inputs.register_hook(found.append)
        results = function(inputs)
        torch.autograd.backward(results, [matrix(*result.shape) for result in results])
        for tensor in (results[0].detach_(), found[0]):
            largest = quantize.noted_largest(tensor)
            assert largest is not None and torch.equal(largest, quantize.largest_value(tensor)), what
            assert quantize.noted_largest(tensor * 1) is None and quantize.noted_largest(tensor.mul_(2)) is None


def noted_rows() -> None:
    """Checks the largest values of rows that experts' activations and permutations note."""
    for width in (48, 2080):
        weights = matrix(5, 1)[:, 0].float().requires_grad_()
        found: list[Tensor] = []
        inputs = matrix(5, width).requires_grad_() * 1
        inputs.register_hook(found.append)
        result = weighted_activation_triton(inputs, None, weights, Activation(F.silu, True), True)
        result.backward(matrix(*result.shape))
        for tensor in (result.detach_(), found[0]):
            largest = quantize.noted_largest_of_rows(tensor)
            assert largest is not None and torch.equal(largest, tensor.abs().amax(1).float())
            assert quantize.noted_largest(tensor) is None
        copies, _ = ChoiceNumbers(torch.tensor([[0, 1], [1, 0], [1, 2]], device=DEVICE), 3).copies(6)
        tokens, rows = (matrix(n, width + 1000).requires_grad_() * 1 for n in (3, 6))
        rows.register_hook(found.append)
        unpermute_triton(rows, copies, True).backward(matrix(3, width + 1000))
        for tensor in (permute_triton(tokens, copies, True).detach_(), found[1]):
            largest = quantize.noted_largest_of_rows(tensor)
            assert largest is not None and torch.equal(largest, tensor.abs().amax(1).float())


def casts() -> None:
    for shape, dtype, wanted in itertools.product(SHAPES, TYPES, ((True, True), (True, False), (False, True))):
        x = matrix(*shape)
        whole = scale_for(x.abs().amax(), dtype)
        scales = whole if wanted[0] else None, whole if wanted[1] else None
        seen = [torch.full((), 0.5, device=DEVICE) for _ in range(2)]
        ours = cast_scaled_triton(x, dtype, *scales, seen[0])
        exact = quantize.cast_scaled(x, dtype, *scales, seen[1])
        for one, other in zip(ours, exact, strict=True):
            same_bits(one, other, (shape, dtype, wanted))
        assert torch.equal(*seen)
    part = matrix(48, 80)[:, 16:48]  # a view with gaps between its rows
    scale = scale_for(part.abs().amax(), TYPES[0])
    for one, other in zip(
        cast_scaled_triton(part, TYPES[0], scale, scale),
        quantize.cast_scaled(part, TYPES[0], scale, scale),
        strict=True,
    ):
        same_bits(one, other, "view")


def by_largest() -> None:
    """Checks scales that a kernel finds itself: also those of zeros, of tiny numbers, and of what is not finite."""
    for shape, dtype, margin in itertools.product(SHAPES, TYPES, (0, 1)):
        x = matrix(*shape)
        largest = quantize.largest_value(x)
        for rows, columns in ((True, True), (True, False), (False, True)):
            compare_by_largest(x, dtype, margin, largest, rows, columns)
    x = matrix(48, 80)
    for largest in (0.0, 1e-42, 0.3, torch.inf, torch.nan):
        for columns in (False, True):
            compare_by_largest(x, TYPES[0], 0, torch.full((), largest, device=DEVICE), True, columns)


def compare_by_largest(x: Tensor, dtype: torch.dtype, margin: int, largest: Tensor, rows: bool, columns: bool) -> None:
    ours = quantize_by_largest_triton(x, dtype, margin, largest, rows=rows, columns=columns)
    exact = quantize.quantize_by_largest(x, dtype, margin, largest, rows=rows, columns=columns)
    what = (x.shape, dtype, margin, largest, rows, columns)
    for one, other in ((ours.rows, exact.rows), (ours.columns, exact.columns)):
        assert (one is None) == (other is None), what
        if one is not None and other is not None:
            same_bits(one.values, other.values, what)
            assert torch.equal(one.factors.nan_to_num(), other.factors.nan_to_num()), what


def blocks() -> None:
    for shape, dtype, (square, margin) in itertools.product(SHAPES, TYPES, ((True, 0), (False, 1))):
        x = matrix(*shape)
        x[:, :8] = 0.0
        for rows, columns in ((True, True), (True, False), (False, True)):
            wanted = {"square": square, "rows": rows, "columns": columns}
            ours = quantize_blocks_triton(x, dtype, margin, **wanted)
            exact = quantize.quantize_blocks(x, dtype, margin, **wanted)
            for one, other in ((ours.rows, exact.rows), (ours.columns, exact.columns)):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    same_bits(one.values, other.values, (shape, dtype, wanted))
                    assert torch.equal(one.factors, other.factors), (shape, dtype, wanted)


def values_that_are_not_finite() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = matrix(48, 80)
        x[3, 5] = bad
        assert torch.equal(largest_value_triton(x).isfinite(), torch.tensor(False, device=DEVICE))
        one = torch.ones((), device=DEVICE)
        for dtype in TYPES:
            for values in cast_scaled_triton(x, dtype, one, one):
                assert values is not None and int(values.float().isnan().sum()) == 1
