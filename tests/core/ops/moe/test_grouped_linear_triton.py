"""GPU products of experts, in Triton's interpreter."""

from typing import Any

import pytest
import torch
from support import expert_kernels

from megatron.core.ops.moe import grouped_linear_triton
from megatron.core.ops.moe.grouped_linear import RowGroups


@pytest.mark.parametrize("check", ["products", "accumulations", "linears", "biases"])
def test_the_kernel_agrees_with_its_reference(check: str) -> None:
    getattr(expert_kernels, check)()


@pytest.mark.parametrize(
    ("capability", "launched"),
    [
        ((8, 0), (False, False, 3)),
        ((8, 9), (False, False, 3)),
        ((9, 0), (True, True, 4)),
        ((10, 0), (True, True, 4)),
        ((12, 0), (True, False, 3)),
    ],
)
def test_gpus_with_less_shared_memory_load_fewer_tiles_ahead(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], launched: tuple[bool, bool, int]
) -> None:
    seen: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return lambda *arguments, **options: seen.append(options)

    monkeypatch.setattr(grouped_linear_triton, "_accumulate_kernel", Kernel())
    monkeypatch.setattr(grouped_linear_triton, "_capability", lambda tensor: capability)
    factors = torch.zeros(64, 128, dtype=torch.bfloat16), torch.zeros(64, 256, dtype=torch.bfloat16)
    groups = RowGroups(torch.tensor([64]), [64])
    grouped_linear_triton.accumulate_grouped_product_triton(torch.zeros(1, 128, 256), *factors, groups)
    assert [(found["BULK"], found["ADDS"], found["num_stages"]) for found in seen] == [launched]
