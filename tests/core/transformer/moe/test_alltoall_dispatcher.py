"""Sizes on the host; `test_token_dispatcher` and `test_moe_layer_over_ranks` have the exchanges."""

import pytest
import torch

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.transformer.moe.alltoall_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.transformer_config import TransformerConfig


@pytest.mark.parametrize("on_device", [False, True])
def test_sizes_stay_on_the_device_where_nobody_needs_them(on_device: bool) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, num_moe_experts=3)
    at = MoEAlltoAllTokenDispatcher(config, ProcessGroupCollection.from_grid(RankGrid(1), 0))
    if on_device:
        at.leave_sizes_on_device()
    exchange = at.plan(Routing(torch.tensor([[2], [0], [2]]), torch.ones(3, 1), None))
    exchange.start_dispatch(torch.arange(3.0)[:, None])
    arrived = exchange.finish_dispatch()
    assert arrived.rows.tolist() == [[1.0], [0.0], [2.0]]  # type: ignore[attr-defined]
    assert arrived.groups.sizes == (None if on_device else [1, 0, 2])  # type: ignore[attr-defined]
