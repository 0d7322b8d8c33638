"""The largest logit of each head equals the largest visible score of a plain product."""

import pytest
import torch

from megatron.core.ops.attention import max_logits
from megatron.core.ops.attention.max_logits import max_attention_logits
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, hidden_keys

S, B, A, G, D = 10, 2, 4, 2, 8

CASES = {
    "full": (AttentionVariant(0.3, causal=False), AttentionCall()),
    "causal": (AttentionVariant(0.3, causal=True), AttentionCall()),
    "window": (AttentionVariant(0.3, causal=True, window=(2, 0)), AttentionCall()),
    "two-sided window": (AttentionVariant(0.3, causal=False, window=(2, 3)), AttentionCall()),
    "cap and ALiBi do not count": (
        AttentionVariant(0.3, causal=True, cap=1.0, slopes=(0.5, 0.25, 0.125, 0.1)),
        AttentionCall(),
    ),
    "mask": (
        AttentionVariant(0.3, causal=True),
        AttentionCall(mask=torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(3)) > 0.7),
    ),
    "mask of keys": (AttentionVariant(0.3, causal=False), AttentionCall(mask=torch.arange(S)[None, None, None] > 6)),
    "positions": (
        AttentionVariant(0.3, causal=True),
        AttentionCall(query_positions=torch.tensor([[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]).expand(B, -1)),
    ),
}


def tensors(rows: int = B) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (S, rows, A, D), (S, rows, G, D)
    query, key = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query, key


def expected(query: torch.Tensor, key: torch.Tensor, variant: AttentionVariant, call: AttentionCall) -> torch.Tensor:
    scores = variant.scale * torch.einsum("qbad,kbad->baqk", query, key.repeat_interleave(A // G, 2))
    hidden = hidden_keys(variant, call, 0, S, S, S, query.device)
    return scores.masked_fill(hidden if hidden is not None else torch.tensor(False), -torch.inf).amax((0, 2, 3))


@pytest.mark.parametrize("rows_at_once", [3, 1000])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_definition(monkeypatch: pytest.MonkeyPatch, case: str, rows_at_once: int) -> None:
    monkeypatch.setattr(max_logits, "SCORES_AT_ONCE", rows_at_once * B * A * S)
    query, key = tensors()
    found = max_attention_logits(query, key, *CASES[case])
    torch.testing.assert_close(found, expected(query, key, *CASES[case]), rtol=1e-14, atol=0)


def test_documents_do_not_see_each_other() -> None:
    query, key = tensors(1)
    variant, call = AttentionVariant(1.0, causal=True), AttentionCall(cu_seqlens=torch.tensor([0, 4, 10]))
    torch.testing.assert_close(max_attention_logits(query, key, variant, call), expected(query, key, variant, call))
    key[0], query[5] = 100.0, 100.0  # the first document's key, the second's query
    assert max_attention_logits(query, key, variant, call).max() < 5000.0


def test_bfloat16_gives_float32_and_nan_is_kept() -> None:
    query, key = (tensor.bfloat16() for tensor in tensors())
    variant, call = AttentionVariant(1.0, causal=True), AttentionCall()
    assert max_attention_logits(query, key, variant, call).dtype is torch.float32
    query[4, 0, 2, 0] = torch.nan
    assert max_attention_logits(query, key, variant, call).isnan().tolist() == [False, False, True, False]
