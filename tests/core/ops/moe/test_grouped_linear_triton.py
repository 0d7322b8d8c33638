"""GPU products of experts, in Triton's interpreter."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from support import expert_kernels

from megatron.core.ops.moe import grouped_linear_triton
from megatron.core.ops.moe.grouped_linear import RowGroups

KERNEL = "megatron.core.ops.moe.grouped_accumulate_triton"


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


@pytest.fixture
def fresh() -> Iterator[None]:
    """Decides anew, before and after the test, whether this Triton compiles the kernel with specialised warps."""
    grouped_linear_triton._specialized_kernel.cache_clear()
    yield
    grouped_linear_triton._specialized_kernel.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_the_installed_triton_compiles_the_kernel_with_specialised_warps() -> None:
    kernel = grouped_linear_triton._specialized_kernel()
    assert kernel is not None and kernel.__name__ == KERNEL


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("version", ["3.2.0", "3.5.1", "3.10.0", "4.0.0+git1"])
def test_another_release_of_triton_uses_the_other_kernel(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert grouped_linear_triton._specialized_kernel() is None
    expert_kernels.specialized()


@pytest.mark.usefixtures("fresh")
def test_a_triton_without_gluon_uses_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    monkeypatch.delattr("megatron.core.ops.moe.grouped_accumulate_triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental", None)
    assert grouped_linear_triton._specialized_kernel() is None
    expert_kernels.specialized()
