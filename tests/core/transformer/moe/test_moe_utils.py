"""Megatron-LM's routing functions on dense maps, against the formulas written out."""

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.transformer.moe import moe_utils

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_softmax_before_and_after_the_choice() -> None:
    weights, chosen = moe_utils.topk_routing_with_score_function(LOGITS, 2)
    top = LOGITS.topk(2)
    assert torch.allclose(weights.gather(1, top.indices), top.values.softmax(-1)) and chosen.sum(1).eq(2).all()
    assert torch.equal(weights > 0, chosen)
    before, experts = moe_utils.topk_routing_with_score_function(LOGITS, 2, use_pre_softmax=True, dense_output=True)
    assert torch.allclose(before, LOGITS.softmax(-1).topk(2).values) and torch.equal(experts, top.indices)


def test_sigmoid_bias_groups_and_factor() -> None:
    scores, bias = LOGITS.sigmoid(), torch.tensor([0.0, 0.0, 0.0, 9.0])
    weights, chosen = moe_utils.topk_routing_with_score_function(
        LOGITS, 2, score_function="sigmoid", expert_bias=bias, scaling_factor=2.0
    )
    assert chosen[:, 3].all()
    picked = torch.where(chosen, scores, 0)
    assert torch.allclose(weights, 2 * picked / picked.sum(1, keepdim=True))
    _, experts = moe_utils.group_limited_topk(scores, 2, 6, 4, 2, 1)
    assert ((experts // 2)[:, 0] == (experts // 2)[:, 1]).all()


def test_capacity_drops_the_smallest_weights() -> None:
    assert moe_utils.get_capacity(12, 4, 0.7) == 3 and moe_utils.get_capacity(12, 4, 0.1, min_capacity=4) == 4
    weights, chosen, counts = moe_utils.topk_softmax_with_capacity(LOGITS, 2, capacity_factor=0.34)
    assert counts.sum() == 12 and chosen.sum(0).max() <= 2
    whole, every = moe_utils.topk_routing_with_score_function(LOGITS, 2)
    for expert in range(4):
        best = whole[:, expert].topk(min(2, int(every[:, expert].sum()))).indices
        assert set(chosen[:, expert].nonzero().flatten().tolist()) == set(best.tolist())
    assert torch.equal(weights, torch.where(chosen, whole, 0))


def test_losses_and_their_attachment() -> None:
    chosen, scores = moe_utils.compute_routing_scores_for_aux_loss(LOGITS, 2, "softmax")
    loss = moe_utils.switch_load_balancing_loss_func(scores, chosen.sum(0), 6, 2, 4, 0.1)
    assert loss.item() == pytest.approx(0.1 * 4 / (2 * 36) * (scores.sum(0) * chosen.sum(0)).sum().item())
    assert moe_utils.z_loss_func(LOGITS, 0.5).item() == pytest.approx(0.5 * LOGITS.logsumexp(-1).square().mean().item())
    output, auxiliary = (torch.ones((), requires_grad=True) for _ in range(2))
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(3.0))
    moe_utils.MoEAuxLossAutoScaler.apply(output * 1, auxiliary * 2).backward()
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    assert auxiliary.grad == 6 and output.grad == 1


def test_the_bias_of_busy_experts_falls() -> None:
    moved = moe_utils.get_updated_expert_bias(torch.tensor([4.0, 0.0, 2.0]), torch.zeros(3), 0.1)
    assert torch.allclose(moved, torch.tensor([-0.1, 0.1, 0.0]))


def test_rows_by_expert_and_back() -> None:
    weights, chosen = moe_utils.topk_routing_with_score_function(LOGITS, 2)
    tokens = torch.arange(12.0, dtype=torch.float64).view(6, 2).requires_grad_()
    rows, of_rows, source = moe_utils.permute(tokens, chosen, probs=weights)
    expected = [token for expert in range(4) for token in range(6) if chosen[token, expert]]
    assert source.tolist() == expected and torch.equal(rows, tokens[source]) and of_rows is not None
    back = moe_utils.unpermute(rows, source, tokens.shape, probs=weights, routing_map=chosen)
    assert torch.allclose(back, tokens)
    assert torch.allclose(moe_utils.unpermute(rows * of_rows[:, None], source, tokens.shape), tokens)
    sizes = chosen.sum(0)
    turned, _ = moe_utils.sort_chunks_by_idxs(rows, sizes, torch.tensor([3, 2, 1, 0]))
    assert torch.equal(turned[: sizes[3]], rows[-sizes[3] :])
    with pytest.raises(UserError, match="drop_and_pad"):
        moe_utils.permute(tokens, chosen, drop_and_pad=True)


def test_the_tracker_of_auxiliary_losses_names_what_reads_them() -> None:
    names = ("clear_aux_losses_tracker", "get_moe_layer_wise_logging_tracker", "save_to_aux_losses_tracker")
    for name in (*names, "reduce_aux_losses_tracker_across_ranks", "track_moe_metrics"):
        with pytest.raises(UserError, match=rf"{name}\(\.\.\.\): .* take_layer_metrics\(model\)"):
            getattr(moe_utils, name)(1.0)
