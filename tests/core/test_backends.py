"""Which backend a layer gets, which implementation a device gets, and what the log says."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core import backends
from megatron.core.backends import LOCAL, ByDevice, choose_backend, triton_backend


def test_without_a_gpu_the_backend_is_local() -> None:
    assert choose_backend(SimpleNamespace(transformer_impl="auto")) is LOCAL


@pytest.mark.parametrize(
    ("asked", "has_triton", "name"), [("auto", True, "triton"), ("local", True, "local"), ("auto", False, "local")]
)
def test_with_a_gpu_it_is_triton_unless_asked_otherwise(
    asked: str, has_triton: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if not has_triton:
        monkeypatch.setattr(backends, "triton_backend", lambda: None)
    assert choose_backend(SimpleNamespace(transformer_impl=asked)).name == name


def test_the_device_of_the_first_tensor_decides() -> None:
    operation = ByDevice(cpu=lambda *arguments: "cpu", cuda=lambda *arguments: "cuda")
    assert operation(3, torch.zeros(1)) == "cpu"
    assert operation(SimpleNamespace(), torch.zeros(1), None) == "cpu"


def test_the_log_names_what_is_not_plain_torch() -> None:
    assert LOCAL.describe("cpu") == "backend local: plain torch but for keep_rows"
    assert LOCAL.describe("cuda") == "backend local: plain torch"
    backend = triton_backend()
    assert backend is not None
    assert "rms_norm" in backend.describe("cuda") and "rms_norm" not in backend.describe("cpu")
