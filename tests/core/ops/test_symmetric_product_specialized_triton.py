"""Symmetric products with specialised warps. Triton's interpreter does not run them: tests/gpu/test_muon_on_gpu.py
compares them with float64, and tests/core/ops/test_compiled_kernels.py compiles them. Here is which products they
compute."""

import pytest
import torch

from megatron.core.ops import symmetric_product_specialized_triton
from megatron.core.ops.symmetric_product_specialized_triton import takes


def test_hopper_multiplies_whole_tiles_with_specialised_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr(symmetric_product_specialized_triton, "capability", lambda device: capability)
    rows = torch.empty(2, 256, 192, dtype=torch.float16)
    columns = torch.empty(2, 192, 256, dtype=torch.float16).mT
    assert takes(rows, rows) and takes(columns, columns)
    assert not takes(rows, columns)
    assert not takes(rows[:, :200], rows[:, :200]) and not takes(rows[..., :160], rows[..., :160])
    assert not takes(rows[:, :64].contiguous(), rows[:, :64].contiguous())
    assert not takes(rows.bfloat16(), rows.bfloat16())
    capability = (10, 0)
    assert not takes(rows, rows)
