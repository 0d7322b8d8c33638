"""Balance losses with one rank. `test_router` compares losses with formulas; `test_router_layouts` has many ranks."""

import pytest
import torch
from torch import Tensor

from megatron.core.ops.moe.routing import balance_scores, best, count_experts
from megatron.core.tokens import Tokens
from megatron.core.transformer.moe.auxiliary_losses import GlobalBalance, coefficients, micro_batch_loss, sequence_loss
from megatron.core.transformer.moe.micro_batch_share import MicroBatchShare

S, B, EXPERTS, K = 6, 3, 4, 2


def share(tokens: Tokens | None = None) -> MicroBatchShare:
    tokens = tokens or Tokens(S, B)
    return MicroBatchShare(tokens, tokens.count, None, None)


def problem(seed: int = 0) -> tuple[Tensor, Tensor]:
    logits = torch.randn(S * B, EXPERTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = balance_scores(logits, "softmax")
    return scores, best(scores, K)


def test_a_sample_is_a_sequence_also_where_a_packed_row_has_several() -> None:
    """One row of B samples: the same tokens, in another order."""
    scores, experts = problem()
    packed = Tokens(S * B, 1, sample_length=S)
    by_sample = torch.arange(S * B).view(S, B).t().flatten()
    value = sequence_loss(scores[by_sample], experts[by_sample], share(packed))
    torch.testing.assert_close(value, sequence_loss(scores, experts, share()))
    assert not torch.isclose(
        value, micro_batch_loss(scores.sum(0), count_experts(experts, EXPERTS), K, share()), rtol=1e-6
    )


def test_what_is_evenly_loaded_has_the_value_one() -> None:
    scores = torch.full((S * B, EXPERTS), 1 / EXPERTS, dtype=torch.float64)
    experts = (torch.arange(S * B)[:, None] // B * K + torch.arange(K)) % EXPERTS
    for value in (
        micro_batch_loss(scores.sum(0), count_experts(experts, EXPERTS), K, share()),
        sequence_loss(scores, experts, share()),
        GlobalBalance().loss(scores.sum(0), count_experts(experts, EXPERTS), K, share(), None),
    ):
        assert float(value) == pytest.approx(1.0)


def test_of_the_global_batch_so_far() -> None:
    seen, tracker = torch.zeros(EXPERTS, dtype=torch.float64), GlobalBalance()
    for step in range(3):
        scores, experts = problem(step)
        counts = count_experts(experts, EXPERTS)
        seen += counts
        expected = EXPERTS / (K * (S * B) ** 2) * float((scores.sum(0) * seen / (step + 1)).sum())
        assert float(tracker.loss(scores.sum(0), counts, K, share(), None)) == pytest.approx(expected, rel=1e-12)
    tracker.reset()
    scores, experts = problem(7)
    value = tracker.loss(scores.sum(0), count_experts(experts, EXPERTS), K, share(), None)
    torch.testing.assert_close(value, micro_batch_loss(scores.sum(0), count_experts(experts, EXPERTS), K, share()))


def test_coefficients_go_with_types() -> None:
    assert coefficients("aux_loss", 0.1) == {"aux_loss": 0.1}
    assert coefficients(["seq_aux_loss", "aux_loss"], [0.1, 0.2]) == {"seq_aux_loss": 0.1, "aux_loss": 0.2}
    assert coefficients(["seq_aux_loss", "aux_loss"], 0.1) == {"seq_aux_loss": 0.1, "aux_loss": 0.1}
    assert coefficients("none", 0.1) == coefficients("aux_loss", 0.0) == coefficients("sinkhorn", 0.0) == {}
