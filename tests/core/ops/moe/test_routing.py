"""Experts and weights against loops over tokens; ties; room; Sinkhorn; and the product that gives the logits."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.ops.moe import routing
from megatron.core.ops.moe.routing import (
    RoutingRule,
    balance_scores,
    best,
    choose_and_count,
    choose_experts,
    router_logits,
    sinkhorn,
    weights_sum_to_one,
    within_best_groups,
    within_capacity,
)

EXPERTS = 8


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def expected_routing(logits: list[float], rule: RoutingRule, bias: list[float]) -> dict[int, float]:
    """Expert -> weight of one token, by the definition."""
    total = sum(math.exp(x) for x in logits)
    if rule.score_function == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        scores = [math.exp(x) / total for x in logits] if rule.scores_first else list(logits)
    compared = [score + b for score, b in zip(scores, bias, strict=True)]
    allowed = set(range(len(logits)))
    if rule.num_groups is not None:
        size = len(logits) // rule.num_groups
        groups = [range(g * size, (g + 1) * size) for g in range(rule.num_groups)]
        by_score = sorted(
            groups, key=lambda g: -sum(sorted((compared[e] for e in g), reverse=True)[: rule.group_score_of])
        )
        allowed = set(itertools.chain(*by_score[: rule.groups_kept]))
    picked = sorted(allowed, key=lambda e: -compared[e])[: rule.topk]
    weights = [scores[e] for e in picked]
    if rule.score_function == "softmax" and not rule.scores_first:
        weights = [math.exp(w) / sum(math.exp(v) for v in weights) for w in weights]
    if rule.renormalises:
        weights = [w / sum(weights) for w in weights]
    return {e: w * (rule.factor or 1.0) for e, w in zip(picked, weights, strict=True)}


RULES = {
    "softmax over the picked": RoutingRule(2),
    "softmax first": RoutingRule(3, scores_first=True),
    "softmax first, renormalised": RoutingRule(3, scores_first=True, renormalises=True, factor=1.5),
    "one": RoutingRule(1, scores_first=True),
    "sigmoid": RoutingRule(2, "sigmoid"),
    "sigmoid, one": RoutingRule(1, "sigmoid"),
    "sigmoid, groups as DeepSeek-V3": RoutingRule(
        4, "sigmoid", renormalises=True, factor=2.5, num_groups=4, groups_kept=2, group_score_of=2
    ),
    "softmax, groups as DeepSeek-V2": RoutingRule(
        3, scores_first=True, factor=16.0, num_groups=4, groups_kept=2, group_score_of=1
    ),
    "groups of logits": RoutingRule(4, num_groups=2, groups_kept=1, group_score_of=4),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_experts_and_weights_are_those_of_the_definition(rule: RoutingRule) -> None:
    logits = numbers(20, EXPERTS)
    bias = numbers(EXPERTS, seed=1).mul(0.3) if rule.score_function == "sigmoid" else None
    experts, weights = choose_experts(logits, rule, bias)
    for row, chosen, weight in zip(logits.tolist(), experts.tolist(), weights.tolist(), strict=True):
        wanted = expected_routing(row, rule, [0.0] * EXPERTS if bias is None else bias.tolist())
        assert chosen == list(wanted)
        assert weight == pytest.approx(list(wanted.values()), rel=1e-12)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gradients_reach_the_logits(rule: RoutingRule) -> None:
    logits = numbers(4, EXPERTS).requires_grad_()
    factors = numbers(4, rule.topk, seed=2)
    assert torch.autograd.gradcheck(lambda x: (choose_experts(x, rule)[1] * factors).sum(), logits)
    (choose_experts(logits, rule)[1] * factors).sum().backward()
    assert logits.grad is not None and logits.grad.abs().max() > 1e-3


def test_of_equals_the_first_is_best_however_many_there_are() -> None:
    """Logits in half precision are often equal; which of them is taken must not depend on the tokens beside."""
    scores = torch.randint(0, 3, (4096, 64), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    together = best(scores, 6)
    assert torch.equal(together, torch.cat([best(part, 6) for part in scores.split(5)]))
    for row, chosen in zip(scores[:50].tolist(), together[:50].tolist(), strict=True):
        assert chosen == sorted(range(64), key=lambda e: (-row[e], e))[:6]


def test_a_bias_changes_who_is_picked_and_not_the_weights() -> None:
    logits, bias = numbers(30, EXPERTS), torch.zeros(EXPERTS)
    bias[5] = 10.0
    experts, weights = choose_experts(logits, RoutingRule(2, "sigmoid"), bias)
    assert (experts == 5).any(1).all()
    torch.testing.assert_close(weights, torch.sigmoid(logits).gather(1, experts))


def test_scores_of_half_precision_logits_are_wide() -> None:
    _, weights = choose_experts(numbers(3, EXPERTS, dtype=torch.bfloat16), RoutingRule(2))
    assert weights.dtype is torch.float32


def test_experts_outside_of_the_best_groups_are_out() -> None:
    scores = torch.tensor([[3.0, -9.0, 1.0, 1.5, 2.0, 0.0]])
    assert within_best_groups(scores, 3, 1, 1).tolist() == [[3.0, -9.0] + [-math.inf] * 4]
    assert within_best_groups(scores, 3, 1, 2).tolist() == [[-math.inf] * 2 + [1.0, 1.5] + [-math.inf] * 2]


def test_a_choice_is_summed_and_counted() -> None:
    logits, real = numbers(9, EXPERTS), torch.arange(9) % 4 != 1
    choice = choose_and_count(logits, RoutingRule(2), None, real)
    experts, weights = choose_experts(logits, RoutingRule(2))
    assert torch.equal(choice.experts, experts) and torch.equal(choice.weights, weights)
    assert (
        choice.counts is not None
        and choice.counts.tolist() == experts[real].flatten().bincount(minlength=EXPERTS).tolist()
    )
    torch.testing.assert_close(choice.score_sums, torch.softmax(logits, 1)[real].sum(0))


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_balance_scores_of_a_token_sum_to_one(function: Any) -> None:
    scores = balance_scores(numbers(5, EXPERTS), function)
    torch.testing.assert_close(scores.sum(1), torch.ones(5, dtype=torch.float64))
    raw = numbers(5, EXPERTS).exp() if function == "softmax" else torch.sigmoid(numbers(5, EXPERTS))
    torch.testing.assert_close(scores, raw / raw.sum(1, keepdim=True))


# ---------------------------------------------------------------------------------------------------------------------
# Room


def expected_room(experts: list[list[int]], capacity: int, wish: Any, order: list[int]) -> list[list[bool]]:
    kept = [[False] * len(row) for row in experts]
    for expert in range(EXPERTS):
        pairs = [(i, j) for i, row in enumerate(experts) for j, e in enumerate(row) if e == expert]
        pairs.sort(key=lambda pair: (0.0 if wish is None else -wish[pair[0]][pair[1]], order[pair[0]]))
        for i, j in pairs[:capacity]:
            kept[i][j] = True
    return kept


@pytest.mark.parametrize("capacity", [1, 4, 100])
@pytest.mark.parametrize("by", ["wish", "equal wishes", "position"])
@pytest.mark.parametrize("ordered", [False, True])
def test_an_expert_takes_the_most_wanted_and_of_equals_the_first(capacity: int, by: str, ordered: bool) -> None:
    experts = best(numbers(40, EXPERTS), 3)
    wish = None if by == "position" else numbers(40, 3, seed=3)
    if by == "equal wishes":
        wish = wish.sign()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)) if ordered else None
    kept = within_capacity(experts, capacity, wish, order)
    places = list(range(40)) if order is None else order.tolist()
    assert kept.tolist() == expected_room(experts.tolist(), capacity, wish if wish is None else wish.tolist(), places)


# ---------------------------------------------------------------------------------------------------------------------
# Sinkhorn


def test_sinkhorn_gives_all_tokens_and_all_experts_equal_shares() -> None:
    shares = sinkhorn(numbers(24, EXPERTS).mul(2).exp(), tolerance=1e-7)
    torch.testing.assert_close(shares.sum(0), torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64))
    torch.testing.assert_close(shares.sum(1), torch.full((24,), 1 / 24, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("scale", "wanted"), [(0.0, 1), (2.0, 11), (3.5, 19)])
def test_the_iteration_that_ends_is_taken_whatever_comes_after(scale: float, wanted: int) -> None:
    cost = numbers(24, EXPERTS).mul(scale).exp()
    rows, columns, change = torch.ones(24, dtype=torch.float64), torch.ones(EXPERTS, dtype=torch.float64), 1.0
    done = 0
    while change > 1e-4:
        done += 1
        rows = 1 / (24 * ((cost * columns).sum(1) + 1e-8))
        new = 1 / (EXPERTS * ((cost * rows[:, None]).sum(0) + 1e-8))
        change, columns = (new - columns).abs().mean().item(), new
    assert done == wanted
    for iterations in (done, done + 1, 64):
        found = sinkhorn(cost, iterations=iterations)
        torch.testing.assert_close(found, columns * cost * rows[:, None], rtol=1e-12, atol=0)


def test_sinkhorn_does_not_ask_the_device() -> None:
    """A fake tensor has no numbers that the host could look at."""
    with FakeTensorMode():
        assert sinkhorn(torch.ones(24, EXPERTS, dtype=torch.float64)).shape == (24, EXPERTS)


def test_sinkhorn_ends_whatever_it_is_given() -> None:
    assert sinkhorn(torch.zeros(0, 4)).shape == (0, 4)
    sinkhorn(torch.full((3, 4), math.inf))
    sinkhorn(torch.full((3, 4), math.nan))
    tiny = sinkhorn(numbers(24, EXPERTS).mul(4).sub(60).exp())  # would go on for ever
    assert tiny.isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Logits


class Sink:
    def __init__(self) -> None:
        self.total = torch.zeros(EXPERTS, 16)

    def add_grouped_product(self, gradient: Tensor, inputs: Tensor, accumulate: Any) -> None:
        assert inputs.dtype is torch.bfloat16  # a deferred product keeps its inputs as they are
        accumulate(self.total, gradient, inputs, factor=2.0)


@pytest.mark.parametrize("in_parts", [False, True])
def test_logits_are_computed_in_the_wider_type_and_so_is_the_weight_gradient(
    in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "_multiplies_in_parts", lambda *arguments: in_parts)
    inputs = numbers(12, 16, dtype=torch.bfloat16).requires_grad_()
    weight = nn.Parameter(numbers(EXPERTS, 16, seed=1, dtype=torch.bfloat16))
    bias = nn.Parameter(numbers(EXPERTS, seed=2, dtype=torch.bfloat16))
    upstream = numbers(12, EXPERTS, seed=3, dtype=torch.float32)
    wide = [t.detach().float().requires_grad_() for t in (inputs, weight, bias)]
    expected = F.linear(*wide)
    expected.backward(upstream)
    weight.main_grad_accumulator = sink = Sink()
    logits = router_logits(inputs, weight, bias, torch.float32)
    logits.backward(upstream)
    assert logits.dtype is torch.float32 and weight.grad is None
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(sink.total, 2.0 * wide[1].grad, rtol=1e-6, atol=1e-6)  # not rounded to bfloat16
    torch.testing.assert_close(inputs.grad, wide[0].grad.to(torch.bfloat16))
    torch.testing.assert_close(bias.grad, wide[2].grad.to(torch.bfloat16))


def test_logits_keep_their_inputs_as_they_are() -> None:
    inputs = numbers(12, 16, dtype=torch.bfloat16).requires_grad_()
    weight = nn.Parameter(numbers(EXPERTS, 16, dtype=torch.bfloat16))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        router_logits(inputs, weight, None, torch.float32)
    assert [t.data_ptr() for t in saved] == [inputs.data_ptr()]


@pytest.mark.parametrize("factor", [None, 1.5])
@pytest.mark.parametrize("renormalises", [False, True])
@pytest.mark.parametrize("scores_first", [False, True])
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_whether_weights_sum_to_one(function: Any, scores_first: bool, renormalises: bool, factor: Any) -> None:
    rule = RoutingRule(2, function, scores_first, renormalises, factor)
    _, weights = choose_experts(numbers(5, EXPERTS), rule)
    assert weights_sum_to_one(rule) == torch.allclose(weights.sum(-1), torch.ones(5, dtype=torch.float64))
