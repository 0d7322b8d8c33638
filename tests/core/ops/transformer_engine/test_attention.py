"""Attention by Transformer Engine (a stand-in computes): what it is given, and what it is not asked for."""

import dataclasses
import math

import pytest
import torch
from support import fake_transformer_engine as fake
from torch import Tensor

from megatron.core.attention_plan import plan_attention
from megatron.core.backends import engine_backend
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.ops.transformer_engine.attention import EngineAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig


def heads(b: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, b, 4, 8), (12, b, 2, 8), (12, b, 2, 6)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (3, 0)])
def test_whole_rows(causal: bool, window: tuple[int, int] | None) -> None:
    variant, call = AttentionVariant(1 / math.sqrt(8), causal, window), AttentionCall()
    given = EngineAttention(fake.FAKE)(*heads(2), variant, call)
    torch.testing.assert_close(given, attention(*heads(2), variant, call))


def test_packed_documents() -> None:
    call = AttentionCall(cu_seqlens=torch.tensor([0, 5, 5, 12]), max_seqlen=7)
    variant = AttentionVariant(0.3, True)
    given = EngineAttention(fake.FAKE)(*heads(1), variant, call)
    torch.testing.assert_close(given, attention(*heads(1), variant, call))


def test_calls_with_a_mask_are_ours() -> None:
    mask = torch.zeros(2, 1, 12, 12, dtype=torch.bool)
    mask[:, :, :, 3] = True
    variant, call = AttentionVariant(0.3, True), AttentionCall(mask=mask)
    torch.testing.assert_close(
        EngineAttention(fake.FAKE)(*heads(2), variant, call), attention(*heads(2), variant, call)
    )


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"dropout": 0.1}, "masks of attention dropout 0.1"), ({"cap": 30.0}, "cap scores"), ({"sink": True}, "sink")],
)
def test_what_it_does_not_compute_falls_to_the_next(more: dict, reason: str) -> None:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "params_dtype": torch.bfloat16, "bf16": True}
    backend, config = engine_backend(fake.FAKE), TransformerConfig(**sizes)
    assert plan_attention(backend, AttentionVariant(1.0, True), config).describe("cpu") == "Transformer Engine"
    assert reason in plan_attention(backend, AttentionVariant(1.0, True, **more), config).describe("cpu")


def test_what_cudnn_computes_is_not_refused_because_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "params_dtype": torch.bfloat16, "bf16": True}
    backend = engine_backend(dataclasses.replace(fake.FAKE, device_types=("cuda",)))
    config = TransformerConfig(**sizes, attention_backend=AttnBackend.fused)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for variant in (AttentionVariant(1.0, False, padded=True), AttentionVariant(1.0, True, chunk=8)):
        assert (
            plan_attention(backend, variant, config).describe("cuda").startswith("SDPA (cuDNN), because Transformer E")
        )


def test_deterministic_runs_need_its_own_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "params_dtype": torch.bfloat16, "bf16": True}
    backend, config, variable = (
        engine_backend(fake.FAKE),
        TransformerConfig(**sizes),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    )
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.delenv(variable, raising=False)
    assert f"{variable}=0 in the environ" in plan_attention(backend, AttentionVariant(1.0, True), config).describe(
        "cpu"
    )
    monkeypatch.setenv(variable, "0")
    assert plan_attention(backend, AttentionVariant(1.0, True), config).describe("cpu") == "Transformer Engine"
