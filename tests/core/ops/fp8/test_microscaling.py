"""MXFP8 against a definition of one element at a time, and the recipe."""

import math

import pytest
import torch
from torch import Tensor

from megatron.core.ops.fp8.block_recipes import build_scaling
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.grouped import Segments, accumulate_product_of_groups, product_of_groups
from megatron.core.ops.fp8.microscaling import quantize_mx
from megatron.core.ops.fp8.quantize import Quantized, dequantize
from megatron.core.ops.fp8.recipes import Fp8Settings, LinearSplit, Role, Scaling

LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SMALLEST = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}
"""Bits of the mantissa, and the smallest exponent of a normal number."""


def nearest(value: float, dtype: torch.dtype) -> float:
    """Rounds to the format's numbers, which have a step of 2^(exponent - bits); `round` takes ties to even."""
    bits, smallest = SMALLEST[dtype]
    exponent = max(math.frexp(value)[1] - 1, smallest) if value else smallest
    step = 2.0 ** (exponent - bits)
    return math.copysign(min(round(abs(value) / step) * step, LIMITS[dtype]), value)


def block_of(values: list[float], dtype: torch.dtype, margin: int) -> tuple[int, list[float]]:
    """Returns the byte of a block's scale, and the elements' values without it."""
    largest, limit = max(abs(value) for value in values), LIMITS[dtype] / 2**margin
    power = next((x for x in range(-127, 127) if largest <= limit * 2.0**x), 127)
    return power + 127, [nearest(value / 2.0**power, dtype) for value in values]


def wild(rows: int, width: int) -> Tensor:
    """Numbers of all sizes; some blocks at and next to a scale's limit, some with zeros alone, and ties."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, generator=generator) * torch.randn(rows, 1, generator=generator).mul_(30).exp2_()
    for row, value in enumerate((448.0, 57344.0, 0.875 * 2.0**-30)):
        x[row] = torch.linspace(-1, 1, width) * value
        x[row + 3] = torch.linspace(-1, 1, width) * torch.nextafter(torch.tensor(value), torch.tensor(torch.inf))
    x[6], x[7], x[8] = 0.0, 2.0**-149, torch.finfo(torch.float32).max
    x[9, :] = torch.arange(width) / 2 + 0.25
    return x


@pytest.mark.parametrize(
    ("dtype", "margin"), [(torch.float8_e4m3fn, 0), (torch.float8_e5m2, 0), (torch.float8_e5m2, 2)]
)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_bits(dtype: torch.dtype, margin: int, kind: torch.dtype) -> None:
    x = wild(40, 72).to(kind).clamp(-3e38, 3e38)
    pair = quantize_mx(x, dtype, margin, rows=True, columns=True)
    for matrix, found in ((x, pair.rows), (x.t(), pair.columns)):
        assert found is not None and found.values.is_contiguous()
        assert found.values.dtype is dtype and found.factors.dtype is torch.float8_e8m0fnu
        scales, values = [], []
        for row in matrix.tolist():
            blocks = [block_of(row[first : first + 32], dtype, margin) for first in range(0, len(row), 32)]
            scales.append([scale for scale, _ in blocks])
            values.append([value for _, block in blocks for value in block])
        expected = torch.tensor(values, dtype=torch.float64)
        assert torch.equal(found.factors.view(torch.uint8), torch.tensor(scales, dtype=torch.uint8))
        assert torch.equal(found.values.view(torch.uint8), expected.to(dtype).view(torch.uint8))
        assert torch.equal(found.values.double(), expected)
        size = torch.tensor(scales).double().sub(127).exp2().repeat_interleave(32, 1)[:, : matrix.shape[1]]
        assert torch.equal(dequantize(found, torch.float64), expected * size)


def test_what_is_not_finite_reaches_the_result() -> None:
    x = torch.ones(2, 64)
    x[0, 3], x[1, 40] = torch.inf, torch.nan
    rows = quantize_mx(x, torch.float8_e4m3fn, rows=True, columns=False).rows
    assert rows is not None
    expected = x.clone()
    expected[0, :32] = expected[1, 32:] = torch.nan
    torch.testing.assert_close(dequantize(rows, torch.float32), expected, rtol=0, atol=0, equal_nan=True)


def wide(matrix: Tensor, scaling: Scaling, role: Role) -> tuple[Tensor, Tensor]:
    """A matrix as it is rounded along its rows, and along its columns."""
    pair = scaling.quantize(matrix, role, rows=True, columns=True, records=True)
    return dequantize(pair.rows, torch.float64), dequantize(pair.columns, torch.float64).t()


def test_segments_are_quantised_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    scaling: Scaling = build_scaling(Fp8Settings("mxfp8", FORMATS["hybrid"]), LinearSplit(), torch.device("cpu"))
    sizes = [40, 0, 130]
    x, g = (torch.randn(170, width, generator=generator, dtype=torch.float64) for width in (64, 96))
    weight = torch.randn(3, 96, 64, generator=generator, dtype=torch.float64)
    segments, of_weight = Segments(torch.tensor(sizes), 170), Segments.of_weight(weight)
    quantized = {
        Role.INPUTS: scaling.quantize(x, Role.INPUTS, segments, rows=True, columns=True, records=True),
        Role.GRADIENTS: scaling.quantize(g, Role.GRADIENTS, segments, rows=True, columns=True, records=True),
        Role.WEIGHTS: scaling.quantize(
            weight.flatten(0, 1), Role.WEIGHTS, of_weight, rows=True, columns=True, records=True
        ),
    }
    inputs, gradients, weights = (quantized[role] for role in (Role.INPUTS, Role.GRADIENTS, Role.WEIGHTS))
    output = product_of_groups(inputs.rows, weights.rows, segments, torch.float64)
    back = product_of_groups(gradients.rows, weights.columns, segments, torch.float64, transposed=True)
    total = torch.zeros(3, 96, 64, dtype=torch.float64)
    accumulate_product_of_groups(total, gradients.columns, inputs.columns, segments)
    first = 0
    for group, size in enumerate(sizes):
        part = slice(first, first + size)
        w_rows, w_columns = wide(weight[group], scaling, Role.WEIGHTS)
        if size:
            x_rows, x_columns = wide(x[part], scaling, Role.INPUTS)
            g_rows, g_columns = wide(g[part], scaling, Role.GRADIENTS)
            torch.testing.assert_close(output[part], x_rows @ w_rows.t())
            torch.testing.assert_close(back[part], g_rows @ w_columns)
            torch.testing.assert_close(total[group], g_columns.t() @ x_columns)
        first += size
    assert not total[1].any()


def test_the_bytes_of_a_matrix() -> None:
    rows = quantize_mx(torch.ones(64, 64), torch.float8_e4m3fn, rows=True, columns=False).rows
    assert isinstance(rows, Quantized) and rows.values.nbytes + rows.factors.nbytes == 64 * 64 + 64 * 2
