"""FlashAttention-3 (a stand-in computes): what it is given, and where it is used."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import backends
from megatron.core.attention_plan import plan_attention
from megatron.core.backends import LOCAL, choose_backend
from megatron.core.ops.attention import flash3
from megatron.core.ops.attention.flash3 import Flash3Attention, find_flash3
from megatron.core.ops.attention.kernels import SDPA_CUDA, Situation
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.kernels_in_use import AttentionInUse
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.setup import notes
from megatron.training.setup.notes import unused_package_notes


class Package:
    """Computes what the package's documentation says, in the layouts of its functions."""

    given: dict[str, Any]

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        self.given = given
        assert q.shape[3] == k.shape[3] == v.shape[3] and q.shape[3] % 8 == 0
        variant = AttentionVariant(given["softmax_scale"], given["causal"], window=given["window_size"])
        found = attention(*(heads.transpose(0, 1) for heads in (q, k, v)), variant, AttentionCall())
        return found.transpose(0, 1), torch.zeros(())

    def flash_attn_varlen_func(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        self.given = given
        assert torch.equal(given["cu_seqlens_q"], given["cu_seqlens_k"])
        variant = AttentionVariant(given["softmax_scale"], given["causal"], window=given["window_size"])
        call = AttentionCall(cu_seqlens=given["cu_seqlens_q"], max_seqlen=given["max_seqlen_q"])
        return attention(*(heads[:, None] for heads in (q, k, v)), variant, call)[:, 0]


def heads(b: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, b, 4, 8), (12, b, 2, 8), (12, b, 2, 6)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


EDGES = torch.tensor([0, 5, 5, 12], dtype=torch.int32)


@pytest.mark.parametrize(
    ("variant", "call", "rows"),
    [
        (AttentionVariant(1 / math.sqrt(8), True), AttentionCall(), 2),
        (AttentionVariant(0.3, False, window=(3, 1)), AttentionCall(), 1),
        (AttentionVariant(0.3, True), AttentionCall(cu_seqlens=EDGES, max_seqlen=7), 1),
        (AttentionVariant(0.3, True, chunk=7), AttentionCall(cu_seqlens=EDGES, max_seqlen=7), 3),
    ],
)
def test_it_computes_the_definition(variant: AttentionVariant, call: AttentionCall, rows: int) -> None:
    package, found = Package(), []
    for compute in (attention, Flash3Attention(package)):
        given = heads(rows)
        output = compute(*given, variant, call)
        output.backward(torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape))
        found.append([output.detach(), *(tensor.grad for tensor in given)])
    for exact, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact)
    assert package.given["deterministic"] is False


def test_calls_with_a_mask_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_flash3", lambda: Flash3Attention(Package()))
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "bf16": True}
    config = TransformerConfig(**sizes, params_dtype=torch.bfloat16, attention_backend=AttnBackend.flash)
    plan = plan_attention(choose_backend(config), AttentionVariant(1.0, True), config)
    calls = AttentionCall(), AttentionCall(mask=torch.zeros(1, 1, 4, 4)), AttentionCall(query_positions=torch.zeros(1))
    found = [plan.kernel_of(Situation("cuda", torch.bfloat16, True, False), call, 8).name for call in calls]
    assert found == ["FlashAttention-3", SDPA_CUDA.name, SDPA_CUDA.name]


def test_it_is_looked_for_on_hopper_only(monkeypatch: pytest.MonkeyPatch) -> None:
    package, capability = Package(), [9]
    assert torch.cuda.is_available() or find_flash3() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability[0], 0))
    monkeypatch.setattr(flash3.importlib.util, "find_spec", lambda name: name == flash3.PACKAGE)
    monkeypatch.setattr(flash3.importlib, "import_module", lambda name: package)
    flash3._import_flash3.cache_clear()
    assert isinstance(find_flash3(), Flash3Attention)
    capability[0] = 8
    assert find_flash3() is None


def test_flash_prefers_it_and_other_settings_do_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_flash3", lambda: Flash3Attention(Package()))
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "bf16": True}
    sizes |= {"params_dtype": torch.bfloat16}

    def kernel(variant: AttentionVariant, asked: AttnBackend) -> str:
        config = TransformerConfig(**sizes, attention_backend=asked)
        return plan_attention(choose_backend(config), variant, config).describe("cuda")

    assert kernel(AttentionVariant(1.0, True), AttnBackend.flash) == "FlashAttention-3"
    assert kernel(AttentionVariant(1.0, True, window=(9, 0)), AttnBackend.flash) == "FlashAttention-3"
    for more in ({"cap": 2.0}, {"padded": True}, {"sink": True}, {"widths": (320, 64)}):
        found = kernel(AttentionVariant(1.0, True, **more), AttnBackend.flash)
        assert not found.startswith("FlashAttention-3") and "because FlashAttention-3" in found
    assert "FlashAttention-3" not in kernel(AttentionVariant(1.0, True), AttnBackend.auto)
    assert choose_backend(TransformerConfig(**sizes)) is LOCAL


def test_a_run_is_told_that_it_is_installed_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found = AttentionInUse(False, ("SDPA (cuDNN)",) * 2, "SDPA (cuDNN)", "cuda", (1, 2))
    assert torch.cuda.is_available() or not list(unused_package_notes(found))
    monkeypatch.setattr(notes, "find_flash3", lambda: Flash3Attention(Package()))
    (note,) = unused_package_notes(found)
    assert "--attention-backend flash uses it" in note
    refused = "FlashAttention-3, because SDPA (cuDNN) sums gradients in an order that varies"
    for other in ({"crosses": True}, {"kernels": ("FlashAttention-3",) * 2, "why": refused}):
        assert not list(unused_package_notes(dataclasses.replace(found, **other)))
