"""The dispatcher that sends a token once to each rank: what a rank sends, planned without communication.

`test_token_dispatcher` runs it on one rank, `test_moe_layer_over_ranks` on several.
"""

import dataclasses
from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.transformer.moe import flex_dispatcher
from megatron.core.transformer.moe.flex_dispatcher import MoEFlexTokenDispatcher
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.transformer_config import TransformerConfig

RANKS = 2
CONFIG = TransformerConfig(num_layers=1, hidden_size=3, num_attention_heads=1, num_moe_experts=4)
EXPERTS = [torch.tensor([[0, 1], [0, 3], [2, 3]]), torch.tensor([[3, 2], [2, 3]])]
"""Experts of each token, by rank. Rank 0 holds experts 0 and 1."""


def routing(rank: int, kept: Any = None) -> Routing:
    weights = torch.arange(1.0, 1 + EXPERTS[rank].numel(), dtype=torch.float64).view(EXPERTS[rank].shape)
    return Routing(EXPERTS[rank], weights, kept)


class Sent:
    """In place of a communication: keeps the tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors


class SentRoute:
    """In place of a route: keeps its sizes."""

    def __init__(self, group: object, sends: list[int], receives: list[int]) -> None:
        self.sends, self.receives = sends, receives

    def go(self, tensor: torch.Tensor) -> Sent:
        return Sent(tensor)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The exchange of each rank. Counts are exchanged by hand."""
    counts: list[torch.Tensor] = []

    def of_all_ranks(self: object, rows: torch.Tensor) -> torch.Tensor:
        counts.append(rows)
        return torch.cat([counts[0], counts[1] if len(counts) > 1 else torch.zeros_like(rows)])

    monkeypatch.setattr(MoEFlexTokenDispatcher, "of_all_ranks", of_all_ranks)
    monkeypatch.setattr(flex_dispatcher, "all_to_all_route", SentRoute)
    monkeypatch.setattr(flex_dispatcher, "AsyncCollective", lambda route, turn, *tensors: Sent(*tensors))
    groups = [ProcessGroupCollection.from_grid(RankGrid(RANKS, expert=RANKS), rank) for rank in range(RANKS)]
    made = [MoEFlexTokenDispatcher(CONFIG, group) for group in groups]
    for rank in range(RANKS):
        made[rank].plan(routing(rank))  # tells the counts
    known = torch.cat(counts)
    monkeypatch.setattr(MoEFlexTokenDispatcher, "of_all_ranks", lambda self, rows: known)
    return [dispatcher.plan(routing(rank)) for rank, dispatcher in enumerate(made)]


def test_a_token_is_sent_once_to_each_rank_with_any_of_its_experts(plans: list[Any]) -> None:
    assert plans[0].wanted.tolist() == [[True, False], [True, True], [False, True]]
    hidden = torch.arange(9.0, dtype=torch.float64).view(3, 3)
    plans[0].start_dispatch(hidden)
    rows, weights = plans[0]._exchange.tensors
    assert torch.equal(rows, hidden[[0, 1, 1, 2]])  # tokens 0 and 1 to rank 0, tokens 1 and 2 to rank 1
    assert torch.equal(weights, routing(0).weights[[0, 1, 1, 2]])
    assert (plans[0].to_experts.sends, plans[0].to_experts.receives) == ([2, 2], [2, 0])


def test_rows_carry_the_local_indices_of_their_experts(plans: list[Any]) -> None:
    plans[0].start_dispatch(torch.zeros(3, 3, dtype=torch.float64))
    assert plans[0].numbers.tolist() == [[0, 1], [0, -1], [-1, 1], [0, 1]]


def test_copies_for_each_expert_are_counted(plans: list[Any]) -> None:
    for plan in plans:
        # [etp, from rank, to rank, local expert]
        assert plan.copy_counts.tolist() == [[[[2, 1], [1, 2]], [[0, 0], [2, 2]]]]


def test_dropped_choices_are_not_sent(plans: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MoEFlexTokenDispatcher, "of_all_ranks", lambda self, rows: torch.cat([rows, 0 * rows]))
    kept = torch.tensor([[False, True], [False, True], [False, False]])
    plan = plans[0].at.plan(routing(0, kept))
    assert plan.wanted.tolist() == [[True, False], [False, True], [False, False]]
    plan.start_dispatch(torch.zeros(3, 3, dtype=torch.float64))
    assert plan.numbers.tolist() == [[-1, 1], [-1, 1]]


def test_ranks_that_share_the_channels_of_experts_need_all_tokens() -> None:
    config = dataclasses.replace(CONFIG, moe_token_dispatcher_type="flex", moe_local_token_overlap=True)
    groups = ProcessGroupCollection.from_grid(RankGrid(2, expert_tensor=2), 0)
    with pytest.raises(UserError, match="moe_local_token_overlap: 2 ranks share the channels of each expert"):
        MoEFlexTokenDispatcher(config, groups)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without GPUs")
def test_copy_engines_are_those_of_gpus() -> None:
    config = dataclasses.replace(CONFIG, moe_token_dispatcher_type="flex", moe_dispatcher_transport="symmetric-memory")
    with pytest.raises(UserError, match="--moe-dispatcher-transport symmetric-memory: this process has no GPU"):
        MoEFlexTokenDispatcher(config, ProcessGroupCollection.from_grid(RankGrid(2, expert=2), 0))
    with torch.device("meta"):  # a dry run plans for GPUs that are elsewhere
        assert MoEFlexTokenDispatcher(config, ProcessGroupCollection.from_grid(RankGrid(2, expert=2), 0)).by_peers


def test_one_rank_uses_the_plain_exchange() -> None:
    groups = ProcessGroupCollection.from_grid(RankGrid(1), 0)
    plan = MoEFlexTokenDispatcher(CONFIG, groups).plan(routing(0))
    assert not isinstance(plan, flex_dispatcher._TokenDispatchCombine)
