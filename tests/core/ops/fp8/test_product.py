"""Products of quantised matrices."""

import pytest
import torch

from megatron.core.ops.fp8.product import emulated_product, product_cuda
from megatron.core.ops.fp8.quantize import dequantize, quantize_blocks
from megatron.core.utils.warn import _warn_once


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


@pytest.mark.parametrize(("dtype", "warned"), [(torch.bfloat16, True), (torch.float64, False)])
def test_a_gpu_that_emulates_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, warned: bool
) -> None:
    """Without a word a run would be slow; in float64 nobody expects fp8 units."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    _warn_once.cache_clear()
    odd = quantize_blocks(torch.randn(6, 300), torch.float8_e4m3fn, 0, square=False, rows=True, columns=False).rows
    assert odd is not None
    assert torch.equal(product_cuda(odd, odd, dtype), emulated_product(odd, odd, dtype))
    assert ("is computed in plain torch, which is slow" in caplog.text) == warned
