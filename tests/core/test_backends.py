"""Which backend a layer gets, which implementation a device gets, and what the log says."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core import backends
from megatron.core.backends import LOCAL, ByDevice, choose_backend, fp8_settings, triton_backend
from megatron.core.exceptions import UserError
from megatron.core.transformer.transformer_config import TransformerConfig


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


def test_triton_is_refused_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = SimpleNamespace(transformer_impl="triton")
    assert choose_backend(asked).name == "triton"
    monkeypatch.setattr(backends, "triton_backend", lambda: None)
    with pytest.raises(UserError, match="--transformer-impl triton: Triton cannot be imported; install it"):
        choose_backend(asked)
    assert choose_backend(SimpleNamespace(transformer_impl="auto")) is LOCAL


def test_the_device_of_the_first_tensor_decides() -> None:
    operation = ByDevice(cpu=lambda *arguments: "cpu", cuda=lambda *arguments: "cuda")
    assert operation(3, torch.zeros(1)) == "cpu"
    assert operation(SimpleNamespace(), torch.zeros(1), None) == "cpu"


def test_the_log_names_what_is_not_plain_torch() -> None:
    assert LOCAL.describe("cpu") == "backend local: plain torch except dropout masks"
    assert LOCAL.describe("cuda") == "backend local: plain torch"
    backend = triton_backend()
    assert backend is not None
    assert backend.describe("cuda") == (
        "backend triton: its own kernels for biases, embeddings, norms, rotary positions, attention, dropout masks, "
        "dropout, convolutions, gated delta nets, state spaces, losses, experts, activations; plain torch for the rest"
    )
    assert backend.describe("cpu") == "backend triton: plain torch except dropout masks"


def test_layers_at_both_ends_can_stay_out_of_fp8() -> None:
    sizes = {"num_layers": 6, "hidden_size": 32, "num_attention_heads": 2}
    config = TransformerConfig(
        **sizes, fp8="e4m3", first_last_layers_bf16=True, num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1
    )
    numbers = [number for number in range(1, 7) if fp8_settings(config, number, LOCAL.fp8_kernels) is not None]
    assert numbers == [3, 4, 5]
    assert fp8_settings(TransformerConfig(**sizes), 3, LOCAL.fp8_kernels) is None


def test_transformer_engine_is_read_as_auto() -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    asked = TransformerConfig(**sizes, transformer_impl="transformer_engine")
    assert choose_backend(asked) is choose_backend(TransformerConfig(**sizes)) is LOCAL
