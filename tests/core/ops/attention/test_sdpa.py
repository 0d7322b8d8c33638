"""Keys and values of different widths: kernels that want one width are given one, and it is said."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.attention_plan import plan_attention, plan_attention_blocks
from megatron.core.backends import LOCAL
from megatron.core.ops.attention import sdpa as attention_sdpa
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.layer_inputs import key_padding_mask

CAUSAL = AttentionVariant(0.3, True)
EDGES = torch.tensor([0, 3, 4, 7], dtype=torch.int32)
WIDTHS = [(6, 5), (5, 8), (6, 6)]


def problem(widths: tuple[int, int], b: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, b, 4, widths[0]), (7, b, 2, widths[0]), (7, b, 2, widths[1])]
    return tuple(torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes)


def check(kernel: Any, inputs: tuple[Tensor, ...], call: AttentionCall) -> None:
    """Results and gradients are those of the definition."""
    found, expected = kernel(*inputs, CAUSAL, call), attention(*inputs, CAUSAL, call)
    assert found.shape == expected.shape
    gradient = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs = zip(*(torch.autograd.grad(y, inputs, gradient) for y in (found, expected)), strict=True)
    for ours, theirs in [(found, expected), *pairs]:
        assert (ours - theirs).abs().max() < 1e-13


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Widths that torch's function is called with."""
    found: list[tuple[int, int]] = []
    compute = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Tensor:
        assert query.shape[-1] == key.shape[-1]
        found.append((key.shape[-1], value.shape[-1]))
        with sdpa_kernel(SDPBackend.MATH):
            return compute(query, key, value, **rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return found


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("packed", [False, True])
def test_on_a_cpu(widths: tuple[int, int], packed: bool, given: list[tuple[int, int]]) -> None:
    call = AttentionCall(cu_seqlens=EDGES, max_seqlen=3) if packed else AttentionCall()
    check(attention_sdpa.sdpa_attention, problem(widths, 1 if packed else 2), call)
    assert set(given) == {(max(widths), max(widths))}


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("name", ["sdpa_attention_cuda", "sdpa_attention_cudnn", "sdpa_attention_flash"])
def test_on_a_gpu(
    name: str, takes: bool, widths: tuple[int, int], given: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(attention_sdpa, "cudnn_takes", lambda *heads: asked.append(heads) or takes)
    check(getattr(attention_sdpa, name), problem(widths), AttentionCall())
    stays = takes and name != "sdpa_attention_flash"
    assert set(given) == {widths if stays else (max(widths), max(widths))}
    assert all(heads[:4] == (4, 2, *widths) for heads in asked)


@pytest.mark.parametrize("takes_groups", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
def test_documents_on_a_gpu(widths: tuple[int, int], takes_groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor, edges: Tensor, *rest: Any, scale: float, **more: Any) -> Any:
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] == 8  # the kernel refuses other widths
        call = AttentionCall(cu_seqlens=edges, max_seqlen=3)
        tensors = (heads.unsqueeze(1) for heads in (query, key, value))
        return attention(*tensors, AttentionVariant(scale, True), call).squeeze(1)

    monkeypatch.setattr(attention_sdpa, "_varlen_kernel", lambda: (kernel, takes_groups))
    check(attention_sdpa.varlen_attention, problem(widths, 1), AttentionCall(cu_seqlens=EDGES, max_seqlen=3))


def test_it_is_said() -> None:
    def said(variant: AttentionVariant, device: str, asked: AttnBackend = AttnBackend.auto, packed: bool = False):
        config = SimpleNamespace(params_dtype=torch.bfloat16, attention_backend=asked)
        return plan_attention(LOCAL, variant, config).describe(device, packed)

    narrow = AttentionVariant(1.0, True, widths=(192, 128))
    padded = "(values of 128 channels padded to 192"
    assert said(narrow, "cpu") == f"SDPA (CPU flash) {padded})"
    assert said(narrow, "cuda").endswith(f") {padded} where cuDNN does not take them)")
    assert said(narrow, "cuda", AttnBackend.flash) == f"SDPA (flash) {padded})"
    odd = AttentionVariant(1.0, True, widths=(6, 6))
    assert said(odd, "cuda", packed=True) == "variable-length flash (heads of 6 channels padded to 8)"
    assert said(narrow, "cuda", packed=True) == f"variable-length flash {padded})"
    assert "(keys of 6 channels padded to 8)" in said(AttentionVariant(1.0, True, widths=(6, 8)), "cpu")
    assert "padded" not in said(narrow, "cpu", AttnBackend.unfused) + said(AttentionVariant(1.0, True), "cuda")
    config = SimpleNamespace(params_dtype=torch.bfloat16, attention_backend=AttnBackend.flash)
    assert padded in plan_attention_blocks(LOCAL, narrow, config).describe("cuda")


PADDING = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]])
ENCODER = AttentionVariant(0.3, False, padded=True)


@pytest.mark.parametrize("compute", [attention_sdpa.sdpa_attention, attention], ids=["SDPA", "unfused"])
def test_keys_of_padding_are_hidden_from_every_query(compute: Any) -> None:
    query, key, value = problem((6, 5))
    found = compute(query, key, value, ENCODER, AttentionCall(mask=key_padding_mask(PADDING)))
    for row, length in enumerate(PADDING.sum(1).tolist()):
        alone = [heads[:length, row : row + 1] for heads in (query, key, value)]
        expected = attention(*alone, AttentionVariant(0.3, False), AttentionCall())
        assert (found[:length, row : row + 1] - expected).abs().max() < 1e-13
    weights = torch.randn(found.shape, dtype=torch.float64) * PADDING.t()[:, :, None, None]
    for gradient in torch.autograd.grad(found, (key, value), weights):
        assert gradient[3:, 1].abs().max() == 0 and gradient[:3, 1].abs().min() > 0


@pytest.mark.parametrize("compute", [attention_sdpa.sdpa_attention, attention], ids=["SDPA", "unfused"])
def test_a_row_of_padding_alone_sees_itself(compute: Any) -> None:
    inputs = problem((6, 6))
    found = compute(*inputs, ENCODER, AttentionCall(mask=key_padding_mask(PADDING * torch.tensor([[1], [0]]))))
    expected = attention(*inputs, AttentionVariant(0.3, False), AttentionCall())
    assert (found - expected).abs().max() < 1e-13


def test_a_mask_of_padding_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    compute = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *heads, **rest: shapes.append(rest["attn_mask"].shape) or compute(*heads, **rest),
    )
    attention_sdpa.sdpa_attention(*problem((6, 6)), ENCODER, AttentionCall(mask=key_padding_mask(PADDING)))
    assert shapes == [(2, 1, 1, 7)]
