"""Which attention kernel a layer gets, what the log says about it, and when another one computes a call."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.attention_plan import plan_attention, plan_attention_blocks
from megatron.core.backends import LOCAL
from megatron.core.ops.attention.kernels import UNFUSED, AttentionKernel, Situation
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import warn


def kernel(name: str, **more: Any) -> AttentionKernel:
    """A kernel that computes everything on every device, but for `more`."""
    defaults: dict[str, Any] = {"serves": lambda situation: True, "refusal": lambda variant, situation: None}
    return AttentionKernel(name, lambda *arguments: torch.zeros(()), **(defaults | more))


FAST = kernel("fast", serves=lambda situation: situation.device_type == "cuda")
WITHOUT_DROPOUT = kernel(
    "exact", refusal=lambda variant, situation: "has no dropout" if situation.training and variant.dropout else None
)


def plan(kernels: list[AttentionKernel], variant: AttentionVariant, asked: AttnBackend = AttnBackend.auto) -> Any:
    backend = LOCAL.with_operations(attention={name: {asked: tuple(kernels)} for name in ("kernels", "block_kernels")})
    config = SimpleNamespace(params_dtype=torch.float32, attention_backend=asked, attention_dropout=variant.dropout)
    if not any(each.for_selected_keys for each in kernels):
        assert plan_attention_blocks(backend, variant, config) == plan_attention(backend, variant, config)
    return plan_attention(backend, variant, config)


def test_the_first_kernel_that_serves_and_computes_is_taken_and_refusals_are_said() -> None:
    choices = plan([FAST, WITHOUT_DROPOUT, UNFUSED], AttentionVariant(1.0, True, dropout=0.1))
    assert choices.describe("cuda") == "fast"
    last = f"{UNFUSED.name}, because exact has no dropout (--attention-dropout 0 is faster)"
    assert choices.describe("cpu") == f"training: {last}; evaluation: exact"


def test_padding_is_said() -> None:
    heads = AttentionVariant(1.0, True, widths=(10, 10))
    values = AttentionVariant(1.0, True, widths=(16, 10))
    padding = kernel("wide", fills="always", width_multiple=8)
    assert plan([padding], heads).describe("cpu") == "wide (heads of 10 channels padded to 16)"
    assert plan([padding], values).describe("cpu") == "wide (values of 10 channels padded to 16)"
    assert plan([kernel("any")], values).describe("cpu") == "any"


def test_a_kernel_that_was_asked_for_and_cannot_compute_is_replaced_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variant = AttentionVariant(1.0, True, dropout=0.1)

    def said(kernels: list[AttentionKernel], asked: AttnBackend, variant: AttentionVariant = variant) -> list[str]:
        warn._warn_once.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert plan(kernels, variant, asked).describe("cuda").startswith(("training: plain torch", "exact"))
        return [record.getMessage() for record in caplog.records]

    assert not said([WITHOUT_DROPOUT, UNFUSED], AttnBackend.fused)  # on a CPU a note says it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert said([WITHOUT_DROPOUT, UNFUSED], AttnBackend.fused) == [
        "--attention-backend fused: attention uses plain torch, because exact has no dropout (--attention-dropout 0 is "
        "faster)"
    ]
    assert not said([WITHOUT_DROPOUT, UNFUSED], AttnBackend.auto)
    # Transformer Engine's attention comes before cuDNN's, which --attention-backend fused asks for.
    preference = kernel("preferred", refusal=lambda variant, situation: "has no chunks", is_preference=True)
    assert not said([preference, WITHOUT_DROPOUT, UNFUSED], AttnBackend.fused, AttentionVariant(1.0, True))
    assert said([preference, WITHOUT_DROPOUT, UNFUSED], AttnBackend.fused)


def test_a_call_that_the_kernel_cannot_compute_takes_the_unfused_one() -> None:
    choices = plan([kernel("plain")], AttentionVariant(1.0, True))
    situation = Situation("cpu", torch.float32, True, True)
    documents = torch.tensor([0, 2, 4])
    assert choices.kernel_of(situation, AttentionCall(cu_seqlens=documents), 8).name == "plain"
    masked = AttentionCall(cu_seqlens=documents, mask=torch.zeros(1, 1, 4, 4, dtype=torch.bool))
    assert choices.kernel_of(situation, masked, 8) is UNFUSED


def test_a_kernel_is_no_reason_for_its_own_use() -> None:
    """Our flash attention is the first choice from Hopper on, and on older GPUs the last before the unfused one."""
    first = kernel("flash", refusal=lambda variant, situation: "is faster than another from Hopper on only")
    choices = plan([first, WITHOUT_DROPOUT, kernel("flash"), UNFUSED], AttentionVariant(1.0, True, dropout=0.1))
    assert choices.describe("cuda") == (
        "training: flash, because exact has no dropout (--attention-dropout 0 is faster); "
        "evaluation: exact, because flash is faster than another from Hopper on only"
    )


def test_layers_that_select_keys_have_a_kernel_for_their_masks() -> None:
    selected = kernel("selected", for_selected_keys=True)
    assert plan([selected, FAST, UNFUSED], AttentionVariant(1.0, True)).describe("cuda") == "fast"
    choices = plan([selected, FAST, UNFUSED], AttentionVariant(1.0, True, selects=True))
    situation = Situation("cuda", torch.float32, True, False)
    for shape, chosen in (((2, 1, 5, 9), selected), ((2, 1, 1, 9), FAST), ((2, 3, 5, 9), FAST), (None, FAST)):
        mask = None if shape is None else torch.zeros(shape, dtype=torch.bool)
        assert choices.kernel_of(situation, AttentionCall(mask=mask), 5) is chosen
