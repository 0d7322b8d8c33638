"""Products of quantised matrices."""

import torch

from megatron.core.ops.fp8.product import emulated_product
from megatron.core.ops.fp8.quantize import dequantize, quantize_blocks


def test_an_emulated_product_is_that_of_the_dequantised_values() -> None:
    generator = torch.Generator().manual_seed(1)
    left = quantize_blocks(
        torch.randn(6, 300, generator=generator), torch.float8_e5m2, 0, square=False, rows=True, columns=False
    ).rows
    right = quantize_blocks(
        torch.randn(140, 300, generator=generator), torch.float8_e4m3fn, 0, square=True, rows=True, columns=False
    ).rows
    assert left is not None and right is not None
    exact = dequantize(left, torch.float64) @ dequantize(right, torch.float64).t()
    assert torch.equal(emulated_product(left, right, torch.float64), exact)
    torch.testing.assert_close(emulated_product(left, right, torch.float32), exact.float())
    assert emulated_product(left, right, torch.bfloat16).dtype is torch.bfloat16
