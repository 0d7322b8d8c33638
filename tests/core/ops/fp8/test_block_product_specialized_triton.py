"""Products of fp8 blocks with specialised warps. Triton's interpreter does not run them:
tests/gpu/test_grouped_fp8_on_gpu.py compares them with their definitions, and tests/core/ops/test_compiled_kernels.py
compiles them."""

import pytest
import torch
from support import fp8_tiles

from megatron.core.ops.fp8 import block_product_specialized_triton, grouped_product_triton
from megatron.core.ops.fp8.block_product_specialized_triton import _factor_tiles


@pytest.mark.parametrize("lines", [1, 128, 130])
def test_factors_of_a_block_begin_at_multiples_of_16_bytes(lines: int) -> None:
    factors = torch.randn(3, lines).t()  # [lines, blocks]
    tiles, step = _factor_tiles(factors)
    assert step % 4 == 0 and tiles.base.data_ptr() % 16 == 0
    assert torch.equal(tiles.base.view(3, step)[:, :lines], factors.t())


def test_other_devices_and_scales_keep_the_kernels_in_plain_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu, by_expert = (fp8_tiles.operands(fp8_tiles.SMALL, scope, False) for scope in ("blocks", "segments"))
    assert grouped_product_triton.specialized_kernels(on_cpu.rows, on_cpu.weight) is None
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen = grouped_product_triton.specialized_kernels(on_cpu.rows, on_cpu.weight)
    assert chosen is block_product_specialized_triton
    assert grouped_product_triton.specialized_kernels(by_expert.rows, by_expert.weight) is None
    capability = (10, 0)
    assert grouped_product_triton.specialized_kernels(on_cpu.rows, on_cpu.weight) is None
