"""Which kernel a call of an attention layer gets, and what is said when it is not the planned one."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.core.attention_plan import plan_attention
from megatron.core.backends import LOCAL, triton_backend
from megatron.core.ops.attention.kernels import SDPA_CPU, SDPA_CUDA, UNFUSED, OwnFlash, Situation
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
from megatron.core.transformer.enums import AttnBackend

MASK = torch.zeros(1, 1, 7, 7, dtype=torch.bool)
EDGES = torch.tensor([0, 3, 7], dtype=torch.int32)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_mask_with_packed_documents_takes_the_unfused_kernel_and_says_so_once(
    packed: bool, masked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = SimpleNamespace(params_dtype=torch.float32, attention_backend=AttnBackend.auto)
    plan = plan_attention(LOCAL, AttentionVariant(1.0, True), config)
    call = AttentionCall(mask=MASK if masked else None, cu_seqlens=EDGES if packed else None)
    with caplog.at_level(logging.WARNING):
        kernels = [plan.kernel_of(Situation("cpu", torch.float32, True, packed), call, 8) for _ in range(2)]
    expected = UNFUSED if packed and masked else SDPA_CPU
    assert kernels == [expected, expected]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (1 if packed and masked else 0)
    assert all("an attention mask with packed documents" in line for line in said)


def test_padding_needs_a_kernel_that_takes_a_mask() -> None:
    config = SimpleNamespace(params_dtype=torch.bfloat16, attention_backend=AttnBackend.auto)
    for backend, kernel in ((AttnBackend.auto, SDPA_CUDA), (AttnBackend.unfused, UNFUSED)):
        config.attention_backend = backend
        plan = plan_attention(LOCAL, AttentionVariant(1.0, False, padded=True), config)
        assert plan.choices[Situation("cuda", torch.bfloat16, True, False)].kernel is kernel
    config.attention_backend = AttnBackend.flash
    plan = plan_attention(LOCAL, AttentionVariant(1.0, False, padded=True), config)
    assert plan.describe("cuda") == f"{SDPA_CUDA.name}, because SDPA (flash) takes no mask of padding"


@pytest.mark.parametrize(
    ("variant", "whole", "packed"),
    [
        (AttentionVariant(1.0, True), "SDPA (flash)", "variable-length flash"),
        (AttentionVariant(1.0, True, dropout=0.1), "our flash", "our flash"),
        (AttentionVariant(1.0, True, window=(9, 0)), "our flash", "variable-length flash"),
        (AttentionVariant(1.0, False, padded=True), "our flash", "variable-length flash"),
        (AttentionVariant(1.0, True, widths=(320, 320)), SDPA_CUDA.name, "plain torch"),
    ],
)
def test_flash_that_cannot_compute_a_layer_gives_way_to_ours(
    variant: AttentionVariant, whole: str, packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout 0.1 is the default of GPT. With it --attention-backend flash once ended a run."""
    backend, config = (
        triton_backend(),
        SimpleNamespace(params_dtype=torch.bfloat16, attention_backend=AttnBackend.flash),
    )
    assert backend is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan = plan_attention(backend, variant, config)
    for is_packed, name in ((False, whole), (True, packed)):
        assert plan.choices[Situation("cuda", torch.bfloat16, True, is_packed)].kernel.name.startswith(name)


def test_cudnn_alone_is_not_used_in_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(params_dtype=torch.bfloat16, attention_backend=AttnBackend.fused)
    assert plan_attention(LOCAL, AttentionVariant(1.0, True), config).describe("cuda") == "SDPA (cuDNN)"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    found = plan_attention(LOCAL, AttentionVariant(1.0, True), config).describe("cuda")
    assert found.startswith(f"{SDPA_CUDA.name}, because SDPA (cuDNN) sums gradients in an order that varies")


def test_deterministic_runs_get_our_own_where_its_sums_have_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    situation = Situation("cuda", torch.bfloat16, True, False)
    plain = AttentionVariant(1.0, True, dropout=0.1, widths=(128, 128))
    others = {"widths": (96, 96), "cap": 1.0, "padded": True, "adds_bias": True}
    ordered, without = OwnFlash(lambda: True), OwnFlash(lambda: False)
    assert (
        ordered.refusal(plain, situation) is None
        and ordered.long_row_refusal(replace(plain, dropout=0.0), situation) is None
    )
    refused = [without.refusal(plain, situation)]
    refused += [ordered.refusal(replace(plain, **{name: value}), situation) for name, value in others.items()]
    assert all("in an order that varies" in str(refusal) for refusal in refused)


def test_windows_are_computed_by_ours_from_hopper_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA computes a window as a mask of all pairs, which costs twice the work of causal attention."""
    backend, config = triton_backend(), SimpleNamespace(params_dtype=torch.bfloat16, attention_backend=AttnBackend.auto)
    variant, situation = AttentionVariant(1.0, True, window=(9, 0)), Situation("cuda", torch.bfloat16, False, False)
    assert backend is not None

    def kernel(call: AttentionCall | None = None, variant: AttentionVariant = variant) -> str:
        return plan_attention(backend, variant, config).kernel_of(situation, call or AttentionCall(), 8).name

    assert kernel() == "our flash attention" and kernel(None, AttentionVariant(1.0, True)) == SDPA_CUDA.name
    generating = AttentionCall(query_positions=torch.zeros(1, 4, dtype=torch.int64))
    assert kernel(generating) == SDPA_CUDA.name  # ours takes no positions of queries
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert kernel() == SDPA_CUDA.name
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert kernel() == "our flash attention"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert kernel() == SDPA_CUDA.name


def test_a_reason_is_given_once() -> None:
    backend, config = triton_backend(), SimpleNamespace(params_dtype=torch.float32, attention_backend=AttnBackend.auto)
    assert backend is not None
    told = plan_attention(backend, AttentionVariant(1.0, True, dropout=0.1), config).describe("cuda")
    assert told.count("cannot draw the masks") == told.count("our flash attention computes in half precision") == 1
