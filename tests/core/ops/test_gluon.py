"""Which releases of Triton use kernels in Gluon."""

import sys
from collections.abc import Iterator

import pytest
import triton

from megatron.core.ops.gluon import gluon_kernel

KERNELS = (
    "attention.flash_forward_specialized_triton",
    "attention.flash_backward_specialized_triton",
    "fp8.block_product_specialized_triton",
    "moe.grouped_product_specialized_triton",
    "symmetric_product_specialized_triton",
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Decides anew, before and after the test, whether this Triton compiles the kernels."""
    gluon_kernel.cache_clear()
    yield
    gluon_kernel.cache_clear()


@pytest.mark.parametrize("name", KERNELS)
def test_the_installed_triton_compiles_the_kernels(name: str) -> None:
    kernel = gluon_kernel(name)
    assert kernel is not None and kernel.__name__ == f"megatron.core.ops.{name}"


@pytest.mark.parametrize("version", ["3.2.0", "3.5.1", "3.10.0", "4.0.0+git1"])
def test_another_release_of_triton_does_not(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert gluon_kernel(KERNELS[0]) is None


def test_a_triton_without_gluon_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"megatron.core.ops.{KERNELS[0]}", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental", None)
    assert gluon_kernel(KERNELS[0]) is None
