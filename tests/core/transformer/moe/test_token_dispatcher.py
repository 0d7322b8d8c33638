"""Dispatch and combine on one rank; `test_moe_layer_over_ranks` has several."""

from typing import Any

import pytest
import torch

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
