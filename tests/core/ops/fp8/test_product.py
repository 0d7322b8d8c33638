"""Products of quantised matrices."""

import pytest
import torch

from megatron.core.ops.fp8 import cublaslt
from megatron.core.ops.fp8.product import accumulate_product, accumulate_product_cuda, emulated_product, product_cuda
from megatron.core.ops.fp8.quantize import Quantized, dequantize, quantize_blocks


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
    odd = quantize_blocks(torch.randn(6, 300), torch.float8_e4m3fn, 0, square=False, rows=True, columns=False).rows
    assert odd is not None
    assert torch.equal(product_cuda(odd, odd, dtype), emulated_product(odd, odd, dtype))
    assert ("is computed in plain torch, which is slow" in caplog.text) == warned


@pytest.mark.parametrize(("rows", "factor", "added"), [(32, 1.0, True), (24, 1.0, False), (32, None, False)])
def test_which_products_cublaslt_adds(
    rows: int, factor: float | None, added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with one factor for each matrix and sizes that divide by 16; others are added by a second kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    calls: list[torch.Tensor] = []
    monkeypatch.setattr(cublaslt, "is_available", lambda: True)
    monkeypatch.setattr(cublaslt, "accumulate_product", lambda total, *rest: calls.append(total) is None)
    monkeypatch.setattr(
        "megatron.core.ops.fp8.product.scaled_mm", lambda a, b, *_, out_dtype, **__: a.float() @ b.float()
    )
    of_rows = torch.ones(rows, 1) if factor is None else torch.tensor(factor)
    left = Quantized(torch.ones(rows, 16).to(torch.float8_e5m2), of_rows)
    right = Quantized(torch.ones(48, 16).to(torch.float8_e4m3fn), torch.ones(48, 1) if factor is None else of_rows)
    total, expected = torch.ones(rows, 48), torch.ones(rows, 48)
    accumulate_product_cuda(total, left, right)
    accumulate_product(expected, left, right)
    assert len(calls) == added and torch.equal(total, torch.ones(rows, 48) if added else expected)
