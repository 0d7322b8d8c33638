"""Products of experts with specialised warps. Triton's interpreter does not run them: tests/gpu/test_experts_on_gpu.py
compares them with float64, and tests/core/ops/test_compiled_kernels.py compiles them. Here is which products they
compute."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.ops.moe import grouped_linear_triton, grouped_product_specialized_triton
from megatron.core.ops.moe.grouped_linear import RowGroups


def test_hopper_multiplies_whole_stages_of_channels_with_specialised_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    capability, called = (9, 0), []

    def noted(name: str, position: int) -> Any:
        return lambda *tensors, **settings: called.append((name, tensors[position].is_contiguous()))

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(grouped_product_specialized_triton, "capability", lambda device: capability)
    monkeypatch.setattr(grouped_product_specialized_triton, "grouped_product_specialized", noted("ours", 1))
    monkeypatch.setattr(grouped_linear_triton, "grouped_mm", noted("torch", 0))

    def chosen(rows: Tensor, experts: int = 2, more: int = 0) -> str:
        weight = torch.empty(experts * 24 * rows.shape[1] + more, dtype=torch.bfloat16)[more:]
        weight = weight.view(experts, 24, rows.shape[1])
        groups = RowGroups(torch.tensor([rows.shape[0], *[0] * (experts - 1)]))
        called.clear()
        grouped_linear_triton.grouped_product_cuda(rows, weight, groups, True)
        assert bool(called) == bool(rows.shape[0])
        return called[0][0] if called else "none"

    rows = torch.empty(5, 192, dtype=torch.bfloat16)
    assert chosen(rows) == "ours" and chosen(rows, experts=512) == "ours"
    assert chosen(rows[:, :128]) == "ours" and called == [("ours", True)]  # of a copy
    assert chosen(rows[:, :96]) == "torch" and chosen(rows, experts=513) == "torch"
    assert chosen(rows, more=4) == "torch"  # the weight begins at no multiple of 16 bytes
    assert chosen(rows[:0]) == "none"
    capability = (10, 0)
    assert chosen(rows) == "torch"
    capability = (9, 0)
    monkeypatch.setattr(grouped_linear_triton, "gluon_kernel", lambda name: None)
    assert chosen(rows) == "torch"
