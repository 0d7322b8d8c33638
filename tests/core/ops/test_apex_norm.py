"""Norms by apex (a stand-in computes): what it is given, and where it is used."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import backends
from megatron.core.backends import LOCAL, choose_backend
from megatron.core.ops import apex_norm
from megatron.core.ops.apex_norm import ApexNorms, find_apex_norms
from megatron.core.ops.norm import layer_norm, rms_norm
from megatron.core.transformer.transformer_config import TransformerConfig


class Functions:
    """Computes what apex's functions compute. The plain ones take one type, the mixed ones return the weight's."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def _norm(self, name: str, inputs: Tensor, weight: Tensor, bias: Tensor | None, shape: Any, eps: float) -> Tensor:
        self.called.append(name)
        assert shape == tuple(weight.shape) and (inputs.dtype is weight.dtype) != name.startswith("mixed")
        assert bias is None or bias.dtype is weight.dtype
        return rms_norm(inputs, weight, eps) if "rms" in name else layer_norm(inputs, weight, bias, eps)

    def __getattr__(self, name: str) -> Any:
        if "rms" in name:
            return lambda inputs, weight, shape, eps: self._norm(name, inputs, weight, None, shape, eps)
        return lambda inputs, weight, bias, shape, eps: self._norm(name, inputs, weight, bias, shape, eps)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_it_computes_the_definition(kind: str, stream: torch.dtype, zero_centered: bool) -> None:
    functions, generator = Functions(), torch.Generator().manual_seed(1)
    x = torch.randn(5, 2, 16, generator=generator).to(stream).requires_grad_()
    weights = [torch.randn(16, generator=generator).bfloat16().requires_grad_() for _ in range(2)]
    leaves = [x, *weights[: 2 if kind == "layer_norm" else 1]]
    results = []
    for norm in ({"layer_norm": layer_norm, "rms_norm": rms_norm}[kind], getattr(ApexNorms(functions), kind)):
        output = norm(*leaves, 1e-5, zero_centered)
        results.append([output, *torch.autograd.grad(output, leaves, torch.cos(output.detach()))])
    for expected, found in zip(*results, strict=True):
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
    assert functions.called == [
        ("" if stream is (torch.float32 if zero_centered else torch.bfloat16) else "mixed_dtype_")
        + f"fused_{kind}_affine"
    ]


def test_the_rest_is_plain_torch() -> None:
    functions = Functions()
    norms, x, weight = ApexNorms(functions), torch.randn(3, 8), torch.ones(8)
    torch.testing.assert_close(norms.rms_norm(x, None, 1e-5), rms_norm(x, None, 1e-5))
    torch.testing.assert_close(norms.layer_norm(x, weight, None, 1e-5), layer_norm(x, weight, None, 1e-5))
    assert norms.rms_norm(x.double(), weight.double(), 1e-5).dtype is torch.float64
    assert norms.rms_norm(x[:0], weight, 1e-5).shape == (0, 8) and not functions.called


def test_it_needs_a_gpu_and_its_compiled_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available() or find_apex_norms() is None
    modules: dict[str, Any] = {"apex.normalization.fused_layer_norm": Functions()}

    def load(name: str) -> Any:
        if name not in modules:
            raise ImportError(f"no module {name}")
        return modules[name]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "apex" or None)
    monkeypatch.setattr(apex_norm.importlib, "import_module", load)
    apex_norm._import_norms.cache_clear()
    assert find_apex_norms() is None
    modules["fused_layer_norm_cuda"] = SimpleNamespace()
    apex_norm._import_norms.cache_clear()
    assert isinstance(find_apex_norms(), ApexNorms)
    apex_norm._import_norms.cache_clear()


def test_it_takes_the_place_of_plain_torch_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = ApexNorms(Functions())
    monkeypatch.setattr(backends, "find_apex_norms", lambda: norms)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    backend = choose_backend(TransformerConfig(**sizes, transformer_impl="local"))
    assert backend.describe("cuda") == "backend local with apex: plain torch except norms"
    assert backend.describe("cpu") == LOCAL.describe("cpu").replace("local", "local with apex")
    x, weight = torch.randn(3, 8), torch.ones(8)
    assert torch.equal(backend.norms.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))  # on a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_backend(TransformerConfig(**sizes)).name == "triton"
    monkeypatch.setattr(backends, "triton_backend", lambda: None)
    assert choose_backend(TransformerConfig(**sizes)).name == "local with apex"
