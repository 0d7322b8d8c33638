"""Dispatch and combine on one rank; `test_moe_layer_over_ranks` has several."""

from typing import Any

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    TokenDispatcher,
)
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN = torch.randn(4, 3, dtype=torch.float64)
EXPERTS = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]])
WEIGHTS = torch.tensor([[0.5, 0.1], [0.2, 0.3], [0.7, 0.4], [0.6, 0.9]], dtype=torch.float64)
CONFIG = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, num_moe_experts=3)
KINDS: list[type[TokenDispatcher]] = [MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher]


def one_rank() -> ProcessGroupCollection:
    return ProcessGroupCollection.from_grid(RankGrid(1), 0)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_get_their_rows_in_order_and_results_are_summed(kind: Any, dropped: bool) -> None:
    kept = torch.ones_like(EXPERTS, dtype=torch.bool)
    kept[1, 0] = not dropped
    routing = Routing(EXPERTS, WEIGHTS * kept, kept if dropped else None)
    exchange = kind(CONFIG, one_rank()).plan(routing)
    exchange.start_dispatch(HIDDEN)
    arrived = exchange.finish_dispatch()
    by_expert = [[token for token in range(4) if (EXPERTS[token].eq(e) & kept[token]).any()] for e in range(3)]
    assert list(arrived.groups.host_sizes) == [len(tokens) for tokens in by_expert]
    assert torch.equal(arrived.rows, HIDDEN[[token for tokens in by_expert for token in tokens]])
    exchange.start_combine(arrived.rows * arrived.weights[:, None])
    torch.testing.assert_close(exchange.finish_combine(), HIDDEN * (WEIGHTS * kept).sum(1, keepdim=True))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_sizes_are_copied_only_where_somebody_reads_them(kind: Any, on_device: bool) -> None:
    at = kind(CONFIG, one_rank())
    if on_device:
        at.leave_sizes_on_device()
    dropped = torch.tensor([[True], [True], [False]])
    for kept in (None, dropped) if kind is MoEAllGatherTokenDispatcher else (None,):
        exchange = at.plan(Routing(torch.tensor([[2], [0], [2]]), torch.ones(3, 1), kept))
        exchange.start_dispatch(torch.arange(3.0)[:, None])
        arrived = exchange.finish_dispatch()
        assert arrived.rows.flatten().tolist() == ([1.0, 0.0, 2.0] if kept is None else [1.0, 0.0])
        # Dropped tokens make the number of rows unknown.
        assert arrived.groups.sizes == (None if on_device and kept is None else [1, 0, 2 if kept is None else 1])


@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_ranks_cannot_share_are_refused(kind: Any) -> None:
    with pytest.raises(UserError, match="num_moe_experts 3 is not divisible by 2 expert parallel ranks"):
        kind(CONFIG, ProcessGroupCollection.from_grid(RankGrid(2, expert=2), 0))
