"""NVFP4 against a definition of one element at a time, and its rotation."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.ops.fp8.block_recipes import build_scaling
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.grouped import Segments, product_of_groups
from megatron.core.ops.fp8.nvfp4 import largest_of_layouts, quantize_nvfp4, rotate, round_e2m1
from megatron.core.ops.fp8.quantize import Quantized, QuantizedPair, dequantize
from megatron.core.ops.fp8.recipes import Fp8Settings, LinearSplit, Role

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Sizes of e2m1 in the order of their codes."""
single = np.float32


def nearest(value: float) -> float:
    """The nearest number, of two that are equally near the one with the even code."""
    code = min(range(8), key=lambda code: (abs(abs(value) - NUMBERS[code]), code % 2))
    return float(np.copysign(NUMBERS[code], value))


def nearest_e4m3(value: np.float32) -> np.float32:
    """The nearest number of e4m3 that is not negative, at most 448."""
    exponent = max(int(np.frexp(value)[1]) - 1, -6)
    step = single(2.0 ** (exponent - 3))
    return min(single(np.round(value / step)) * step, single(448))


def factor_of(block: list[float], largest: float) -> np.float32:
    of_tensor = single(largest) / single(6 * 448) if largest else single(1)
    of_block = max(single(abs(value)) for value in block)
    return nearest_e4m3(of_block / single(6) / of_tensor) * of_tensor


def number(value: float, factor: np.float32, kind: torch.dtype) -> float:
    wide = np.float64 if kind is torch.float64 else single
    return nearest(float(wide(value) / wide(factor))) if factor else float(np.copysign(0.0, value))


def quantized(matrix: Tensor, is_weight: bool) -> QuantizedPair:
    largest = largest_of_layouts(matrix, is_weight=is_weight, columns=True)
    return quantize_nvfp4(matrix, largest, is_weight=is_weight, rows=True, columns=True)


def some(rows: int, width: int, kind: torch.dtype) -> Tensor:
    """Numbers of many sizes, with blocks of zeros, blocks whose scale is rounded to 0, and ties."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, width, generator=generator) * torch.randn(rows, 1, generator=generator).mul_(4).exp2_()
    x[1], x[2] = 0.0, 2.0**-30
    x[3, :16] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6])
    return x.to(kind)


def test_numbers_of_four_bits() -> None:
    grid = torch.arange(-1000, 1001, dtype=torch.float64) / 125
    grid = torch.cat([grid, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0], dtype=torch.float64)])
    expected = [nearest(value) for value in grid.tolist()]
    for kind in (torch.float64, torch.float32):
        assert round_e2m1(grid.to(kind)).tolist() == expected
    assert {abs(value) for value in expected} == set(NUMBERS)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_bits(kind: torch.dtype) -> None:
    x = some(40, 72, kind)
    pair = quantized(x, is_weight=False)
    for matrix, found in ((x, pair.rows), (rotate(x.t()), pair.columns)):
        assert found is not None
        largest, factors, values = float(matrix.abs().max()), [], []
        for row in matrix.tolist():
            blocks = [row[first : first + 16] for first in range(0, len(row), 16)]
            factors.append([factor_of(block, largest) for block in blocks])
            of_each = zip(blocks, factors[-1], strict=True)
            values.append([number(value, factor, matrix.dtype) for block, factor in of_each for value in block])
        assert found.factors.tolist() == np.array(factors).tolist()
        assert found.values.float().tolist() == values
        expected = (
            torch.tensor(values).double()
            * torch.tensor(np.array(factors)).double().repeat_interleave(16, 1)[:, : matrix.shape[1]]
        )
        assert torch.equal(dequantize(found, torch.float64), expected)


def test_weights_have_square_blocks() -> None:
    x = some(40, 72, torch.float32)
    pair = quantized(x, is_weight=True)
    assert pair.rows is not None and pair.columns is not None
    largest = float(x.abs().max())
    for row in range(0, 40, 16):
        for column in range(0, 72, 16):
            block = x[row : row + 16, column : column + 16]
            factor = factor_of(block.flatten().tolist(), largest)
            of_rows = pair.rows.factors[row : row + 16, column // 16]
            assert of_rows.tolist() == [float(factor)] * block.shape[0]
            expected = [[number(value, factor, torch.float32) for value in values] for values in block.tolist()]
            assert pair.rows.values[row : row + 16, column : column + 16].float().tolist() == expected
    assert torch.equal(dequantize(pair.rows, torch.float64), dequantize(pair.columns, torch.float64).t())


def test_a_rotation_keeps_products_and_spreads_an_outlier() -> None:
    generator = torch.Generator().manual_seed(4)
    x, g = (torch.randn(height, 70, generator=generator, dtype=torch.float64) for height in (5, 7))
    torch.testing.assert_close(rotate(x) @ rotate(g).t(), x @ g.t(), atol=1e-13, rtol=0)
    outlier = torch.zeros(1, 20)
    outlier[0, 3] = outlier[0, 17] = 8.0
    assert rotate(outlier)[0, :16].abs().tolist() == [2.0] * 16 and rotate(outlier)[0, 16:].tolist() == [0, 8, 0, 0]


def test_what_is_not_finite_reaches_the_result() -> None:
    for value in (torch.inf, torch.nan):
        x = torch.ones(16, 32)
        x[3, 3] = value
        for pair in (quantized(x, is_weight=False), quantized(x, is_weight=True)):
            for found in (pair.rows, pair.columns):
                assert isinstance(found, Quantized) and dequantize(found, torch.float32).isnan().any()


def test_each_expert_has_a_scale_of_its_own() -> None:
    generator = torch.Generator().manual_seed(2)
    scaling = build_scaling(Fp8Settings("nvfp4", FORMATS["e4m3"]), LinearSplit(), torch.device("cpu"))
    x = torch.randn(50, 32, generator=generator, dtype=torch.float64)
    x[20:] *= 1000
    weight = torch.randn(3, 16, 32, generator=generator, dtype=torch.float64)
    segments, of_weight = Segments(torch.tensor([20, 0, 30]), 50), Segments.of_weight(weight)
    inputs = scaling.quantize(x, Role.INPUTS, segments, rows=True, columns=True, records=True)
    weights = scaling.quantize(weight.flatten(0, 1), Role.WEIGHTS, of_weight, rows=True, columns=True, records=True)
    output = product_of_groups(inputs.rows, weights.rows, segments, torch.float64)
    for part, group in ((slice(0, 20), 0), (slice(20, 50), 2)):
        rows, own = quantized(x[part], is_weight=False).rows, quantized(weight[group], is_weight=True).rows
        assert rows is not None and own is not None
        expected = dequantize(rows, torch.float64) @ dequantize(own, torch.float64).t()
        torch.testing.assert_close(output[part], expected)
