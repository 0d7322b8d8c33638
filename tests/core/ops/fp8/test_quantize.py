"""Definitions of quantisation."""

import pytest
import torch
from torch import Tensor

from megatron.core.ops.fp8.formats import largest_finite
from megatron.core.ops.fp8.quantize import Quantized, cast_scaled, dequantize, largest_value, quantize_blocks

E4M3 = torch.float8_e4m3fn
STEP = 2.0**-4
"""Half a unit in the last place of e4m3, relative to a normal number."""


def matrix(m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)) * torch.arange(1, k + 1)


def test_largest_values() -> None:
    x = matrix(5, 7)
    x[2, 3] = -1e3
    assert largest_value(x) == 1e3 and largest_value(x[:0]) == 0.0
    x[0, 0] = torch.nan
    assert bool(largest_value(x).isnan())


def test_both_layouts_of_a_cast_have_the_same_values() -> None:
    x, scale, seen = matrix(6, 10), torch.tensor(2.0), torch.tensor(1.0)
    rows, columns = cast_scaled(x, E4M3, scale, scale, seen)
    assert rows is not None and columns is not None and columns.is_contiguous()
    assert torch.equal(rows.view(torch.uint8).t(), columns.view(torch.uint8)) and seen == x.abs().max()
    assert cast_scaled(x, E4M3, None, scale)[0] is None


@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (1, 16)])
@pytest.mark.parametrize("square", [True, False])
def test_blocks(shape: tuple[int, int], square: bool) -> None:
    x = matrix(*shape)
    pair = quantize_blocks(x, E4M3, 0, square=square, rows=True, columns=True)
    for quantized, exact in ((pair.rows, x), (pair.columns, x.t())):
        assert quantized is not None
        m, k = exact.shape
        blocks = -(-k // 128)
        assert quantized.values.shape == exact.shape
        assert quantized.factors.shape == ((-(-m // 128) if square else m), blocks)
        error = (dequantize(quantized, torch.float32) - exact).abs()
        # The smallest numbers of e4m3 are 2^-9 apart.
        coarsest = 2.0**-10 * exact.abs().max() / largest_finite(E4M3)
        assert bool((error <= STEP * exact.abs() + coarsest).all())
        first = quantized.factors[0, 0] * largest_finite(E4M3)
        torch.testing.assert_close(first, exact[: 128 if square else 1, :128].abs().max())


def test_factors_of_lines_and_of_the_whole() -> None:
    x = matrix(4, 300)
    values = x.to(E4M3)
    whole = dequantize(Quantized(values, torch.tensor(2.0)), torch.float64)
    assert whole.dtype is torch.float64 and torch.equal(whole, values.double() * 2)
    factors = torch.arange(1.0, 5.0)[:, None]
    assert torch.equal(dequantize(Quantized(values, factors), torch.bfloat16), values.float() * factors)
