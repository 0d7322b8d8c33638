"""Attention kernels of a CPU against a loop over heads and queries; which kernel is chosen, and what is refused."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron.core.attention_plan import plan_attention, plan_attention_blocks
from megatron.core.backends import LOCAL
from megatron.core.ops.attention.kernels import SDPA_CPU, SDPA_CUDA, SDPA_CUDNN, SDPA_FLASH, UNFUSED, VARLEN, Situation
from megatron.core.ops.attention.sdpa import sdpa_attention
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.transformer.enums import AttnBackend

VARIANTS = {
    "causal": AttentionVariant(0.3, True),
    "full": AttentionVariant(0.3, False),
    "window": AttentionVariant(0.3, True, window=(2, 0)),
    "window both ways": AttentionVariant(0.3, False, window=(2, 1)),
    "window to the left": AttentionVariant(0.3, False, window=(-1, 2)),
}


CHANGED = {
    "bounded": AttentionVariant(0.3, True, cap=0.5),
    "ALiBi": AttentionVariant(0.3, True, slopes=(9.0, 9.0, 0.5, 0.2, 0.1, 0.7)),
    "ALiBi both ways, bounded, window": AttentionVariant(
        0.3, False, window=(3, 2), cap=0.5, slopes=(9.0, 9.0, 0.5, 0.2, 0.1, 0.7)
    ),
}
"""Scores that are more than scaled products; slopes of six heads, of which the last four are here."""


def problem(sq: int, sk: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sq, 2, 4, 6), (sk, 2, 2, 6), (sk, 2, 2, 5)]
    return tuple(torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes)


def loops(q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, call: AttentionCall) -> Tensor:
    (sq, b, a, _), sk = q.shape, k.shape[0]
    left, right = variant.window or (-1, -1)
    rows = []
    for i, row, head in itertools.product(range(sq), range(b), range(a)):
        here, group, seen = i + sk - sq, head * k.shape[2] // a, []
        for j in range(sk):
            visible = (not variant.causal or j <= here) and (left < 0 or j >= here - left)
            visible &= right < 0 or j <= here + right
            visible &= call.mask is None or not call.mask[row, 0, i, j]
            if call.cu_seqlens is not None:
                visible &= not any(min(i, j) < edge <= max(i, j) for edge in call.cu_seqlens.tolist())
            if visible:
                seen.append(j)
        scores = torch.stack([q[i, row, head] @ k[j, row, group] * variant.scale for j in seen])
        if variant.cap is not None:
            scores = variant.cap * torch.tanh(scores / variant.cap)
        if variant.slopes is not None:
            slope = variant.slopes[call.first_head + head]
            scores = scores - slope * torch.tensor([abs(here - j) for j in seen], dtype=torch.float64)
        p = torch.softmax(scores, 0)
        rows.append(sum(weight * v[j, row, group] for weight, j in zip(p, seen, strict=True)))
    return torch.stack(rows).view(sq, b, a, -1)


def check(kernel, inputs: tuple, variant: AttentionVariant, call: AttentionCall) -> None:
    expected, result = loops(*inputs, variant, call), kernel(*inputs, variant, call)
    dy = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted, given = (torch.autograd.grad(y, inputs, dy) for y in (expected, result))
    for a, e in zip([result, *given], [expected, *wanted], strict=True):
        assert torch.allclose(a, e, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kernel", [attention, sdpa_attention])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [(7, 7), (3, 7)])
def test_against_loops(kernel, variant: str, sizes: tuple[int, int]) -> None:
    check(kernel, problem(*sizes), VARIANTS[variant], AttentionCall())


@pytest.mark.parametrize("variant", CHANGED)
@pytest.mark.parametrize("sizes", [(7, 7), (3, 7)])
def test_scores_that_are_more_than_scaled_products(variant: str, sizes: tuple[int, int]) -> None:
    check(attention, problem(*sizes), CHANGED[variant], AttentionCall(first_head=2))


@pytest.mark.parametrize("kernel", [attention, sdpa_attention])
@pytest.mark.parametrize("variant", VARIANTS)
def test_mask(kernel, variant: str) -> None:
    mask = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(2)) < 0.4
    mask[:, :, range(7), range(7)] = False
    check(kernel, problem(7, 7), VARIANTS[variant], AttentionCall(mask=mask))


@pytest.mark.parametrize("kernel", [attention, sdpa_attention])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents(kernel, variant: str) -> None:
    cu_seqlens = torch.tensor([0, 3, 3, 4, 7], dtype=torch.int32)
    inputs = tuple(t[:, :1].detach().requires_grad_() for t in problem(7, 7))
    check(kernel, inputs, VARIANTS[variant], AttentionCall(cu_seqlens=cu_seqlens, max_seqlen=3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype) -> None:
    inputs = [t.detach().to(dtype) for t in problem(7, 7)]
    expected = loops(*(t.double() for t in inputs), VARIANTS["causal"], AttentionCall())
    for kernel in (attention, sdpa_attention):
        result = kernel(*inputs, VARIANTS["causal"], AttentionCall())
        assert result.dtype is dtype and torch.allclose(result.double(), expected, rtol=2e-2, atol=2e-2)


def test_a_query_without_keys_is_finite() -> None:
    inputs = problem(7, 7)
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    result = attention(*inputs, VARIANTS["full"], AttentionCall(mask=mask))
    result.sum().backward()
    assert torch.allclose(result[0, 0, 0], inputs[2][:, 0, 0].mean(0)) and inputs[0].grad.isfinite().all()


def plan(variant: AttentionVariant, dtype=torch.bfloat16, asked=AttnBackend.auto):
    return plan_attention(
        LOCAL, variant, SimpleNamespace(params_dtype=dtype, attention_backend=asked, attention_dropout=0.1)
    )


def test_choice_of_kernels() -> None:
    plain, dropping = AttentionVariant(1.0, True), AttentionVariant(1.0, True, dropout=0.1)
    sink = AttentionVariant(1.0, True, sink=True)
    half, single = torch.bfloat16, torch.float32
    for variant, situation, kernel in [
        (plain, Situation("cpu", half, True, False), SDPA_CPU),
        (plain, Situation("cpu", half, True, True), SDPA_CPU),
        (plain, Situation("cuda", half, True, False), SDPA_CUDA),
        (plain, Situation("cuda", half, True, True), VARLEN),
        (plain, Situation("cuda", single, True, True), UNFUSED),
        (dropping, Situation("cuda", half, True, False), UNFUSED),
        (dropping, Situation("cuda", half, False, False), SDPA_CUDA),
        (sink, Situation("cpu", half, False, False), UNFUSED),
        (AttentionVariant(1.0, True, cap=5.0), Situation("cuda", half, True, False), UNFUSED),
        (AttentionVariant(1.0, True, slopes=(0.5,)), Situation("cuda", half, True, True), UNFUSED),
        (AttentionVariant(1.0, True, chunk=5), Situation("cuda", half, True, True), VARLEN),
    ]:
        assert plan(variant, situation.dtype).choices[situation].kernel is kernel, situation
    for asked in (AttnBackend.unfused, AttnBackend.local):
        assert {choice.kernel for choice in plan(plain, asked=asked).choices.values()} == {UNFUSED}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"cap": 5.0}, "cannot cap scores (at 5.0)"),
        ({"slopes": (0.5,)}, "has no ALiBi"),
        ({"chunk": 4}, "has no chunked attention"),
    ],
)
def test_fused_blocks_say_what_they_cannot(more: dict, reason: str) -> None:
    config = SimpleNamespace(params_dtype=torch.bfloat16, attention_backend=AttnBackend.auto)
    described = plan_attention_blocks(LOCAL, AttentionVariant(1.0, True, **more), config).describe("cuda")
    assert described == f"plain torch in blocks, because attention in blocks (cuDNN, flash) {reason}"


def test_choice_and_fallback_can_be_printed() -> None:
    fused = "SDPA (cuDNN, flash, efficient, math)"
    assert plan(AttentionVariant(1.0, True)).describe("cuda") == fused
    assert plan(AttentionVariant(1.0, True), torch.float32).describe("cuda", packed=True) == (
        "plain torch, because variable-length flash computes in half precision, not in float32 (--bf16 is faster)"
    )
    assert plan(AttentionVariant(1.0, True, dropout=0.1)).describe("cuda") == (
        f"training: plain torch, because {fused} cannot draw the masks of attention dropout 0.1 "
        f"(--attention-dropout 0 is faster); evaluation: {fused}"
    )


def test_a_flag_is_named_only_if_it_suffices() -> None:
    with_alibi = plan(AttentionVariant(1.0, True, dropout=0.1, slopes=(0.5,))).describe("cpu")
    assert "cannot draw the masks of attention dropout 0.1" in with_alibi and "is faster" not in with_alibi


def test_the_kernel_asked_for_is_taken() -> None:
    variant = AttentionVariant(1.0, True)
    training = Situation("cuda", torch.bfloat16, True, False)
    assert plan(variant, asked=AttnBackend.flash).choices[training].kernel is SDPA_FLASH
    assert plan(variant, asked=AttnBackend.fused).choices[training].kernel is SDPA_CUDNN
    packed = Situation("cuda", torch.bfloat16, True, True)
    assert plan(variant, asked=AttnBackend.flash).choices[packed].kernel is VARLEN


@pytest.mark.parametrize("asked", [AttnBackend.flash, AttnBackend.fused])
def test_what_cannot_be_honoured_gives_way_to_the_next(asked: AttnBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = AttentionVariant(1.0, True, dropout=0.1)
    on_cpu = plan(variant, asked=asked)
    assert on_cpu.choices[Situation("cpu", torch.bfloat16, True, False)].refusals  # which the log names
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    choice = plan(variant, asked=asked).choices[Situation("cuda", torch.bfloat16, True, False)]
    assert choice.kernel is UNFUSED and "masks of attention dropout 0.1" in choice.refusals[0][1]
