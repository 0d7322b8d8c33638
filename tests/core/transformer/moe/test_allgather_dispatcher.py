"""Sizes on the host; `test_token_dispatcher` and `test_moe_layer_over_ranks` have the exchanges."""

import pytest
import torch

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.transformer.moe.allgather_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.transformer_config import TransformerConfig


@pytest.mark.parametrize("on_device", [False, True])
def test_sizes_are_copied_only_where_somebody_reads_them(on_device: bool) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, num_moe_experts=3)
    at = MoEAllGatherTokenDispatcher(config, ProcessGroupCollection.from_grid(RankGrid(1), 0))
    if on_device:
        at.leave_sizes_on_device()
    for kept in (None, torch.tensor([[True], [True], [False]])):  # dropped tokens make the number of rows unknown
        exchange = at.plan(Routing(torch.tensor([[2], [0], [2]]), torch.ones(3, 1), kept))
        exchange.start_dispatch(torch.arange(3.0)[:, None])
        arrived = exchange.finish_dispatch()
        assert arrived.rows.flatten().tolist() == ([1.0, 0.0, 2.0] if kept is None else [1.0, 0.0])
        assert (arrived.groups.sizes is None) == (on_device and kept is None)
