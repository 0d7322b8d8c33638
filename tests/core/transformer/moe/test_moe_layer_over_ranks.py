"""A layer of experts that ranks share: what is sent, and what fp8 is told. tests/parity compares the numbers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool
from support.tiny_models import tiny_config
from torch import Tensor, nn

from megatron.core.backends import backend_of_layer, choose_backend
from megatron.core.communication.traffic import recorded
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.parameters import initialize_parameters, name_parameters
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.moe_layer import DISPATCHERS, MoELayer, MoESubmodules
from megatron.core.transformer.moe.routing import Routing

HIDDEN, LENGTH, ROWS = 8, 6, 2


def build(dispatcher: str, groups: ProcessGroupCollection, **settings: Any) -> nn.Module:
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 2, "moe_ffn_hidden_size": 12, "init_method_std": 0.5}
    experts = {"num_moe_experts": 8, "moe_aux_loss_coeff": 0.1, "moe_token_dispatcher_type": dispatcher}
    config = tiny_config(**sizes, **experts, **settings)
    model = nn.Module()
    model.mlp = MoELayer(config, MoESubmodules(experts=GroupedMLP), layer_number=1, pg_collection=groups)
    name_parameters(model)
    initialize_parameters(model, 3)
    return model


def run(model: nn.Module, number: int) -> Tensor:
    """Runs a micro-batch forward and backward; returns its inputs [t, h]."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(LENGTH * ROWS, HIDDEN, dtype=torch.float64, generator=generator)
    output, _ = model.mlp(inputs.clone().requires_grad_(), LayerInputs(Tokens(LENGTH, ROWS)))
    output.sum().backward()
    return inputs


def sources(dispatcher: str, precision: dict[str, Any], etp: int) -> tuple[list[int], list[list[int]] | None]:
    """Returns the rows of each expert of this rank, and how many of them each source sent, if the experts are told."""
    groups = ProcessGroupCollection.from_grid(RankGrid(4, expert=4 // etp, expert_tensor=etp), dist.get_rank())
    kind = {"num_moe_experts": 8, "moe_token_dispatcher_type": dispatcher, "expert_model_parallel_size": 4 // etp}
    config = tiny_config(fp64=False, bf16=True, **kind, **precision)
    generator = torch.Generator().manual_seed(dist.get_rank())
    experts = torch.rand(24, 8, generator=generator).topk(2).indices
    backend = backend_of_layer(choose_backend(config), config, 1, groups)
    exchange = DISPATCHERS[dispatcher](config, groups, backend).plan(Routing(experts, torch.ones(24, 2)))
    exchange.start_dispatch(torch.zeros(24, 16, dtype=torch.bfloat16))
    rows = exchange.finish_dispatch().groups
    return list(rows.host_sizes), None if rows.by_source is None else rows.by_source.tolist()


@pytest.mark.parametrize("etp", [1, 2])
def test_experts_in_fp8_know_which_ranks_their_rows_are_from(etp: int, pool: Pool) -> None:
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    expected = pool.run(sources, 4, "alltoall", fp8, etp)
    assert any(sizes != [12] * len(sizes) for sizes, _ in expected)
    assert pool.run(sources, 4, "allgather", fp8, etp) == expected
    # Others do not need it, and it takes time.
    assert [told for _, told in pool.run(sources, 4, "allgather", {}, etp)] == [None] * 4


def sent(dispatcher: str) -> dict[str, float]:
    groups = ProcessGroupCollection.from_grid(RankGrid(4, expert=4), dist.get_rank())
    model = build(dispatcher, groups)
    with recorded() as traffic:
        run(model, groups.rank("dp"))
    totals: dict[str, float] = {}
    for entry in traffic:
        totals[entry.operation] = totals.get(entry.operation, 0) + 1
    return totals


def test_what_is_sent(pool: Pool) -> None:
    """All-to-all: rows and weights go, rows come back, and their gradients the other way; one gather tells sizes."""
    assert pool.run(sent, 4, "alltoall") == [{"all_gather": 1, "all_to_all": 6}] * 4
    # Flex: numbers of experts go beside them.
    assert pool.run(sent, 4, "flex") == [{"all_gather": 1, "all_to_all": 7}] * 4
    # All-gather: rows, weights and numbers of experts come, sums go; backward gathers once and sums twice.
    assert pool.run(sent, 4, "allgather") == [{"all_gather": 4, "reduce_scatter": 3}] * 4


def rows_sent(dispatcher: str) -> tuple[float, int, int]:
    """Rows of the first exchange; copies for experts, and pairs of a token and a rank that holds any of its experts."""
    groups = ProcessGroupCollection.from_grid(RankGrid(4, expert=4), dist.get_rank())
    model = build(dispatcher, groups, moe_router_topk=4, moe_expert_capacity_factor=0.8)
    with recorded() as traffic:
        inputs = run(model, groups.rank("dp"))
    routing = model.mlp.router.route(inputs, LayerInputs(Tokens(LENGTH, ROWS)))
    assert routing.kept is not None
    pairs = {(int(t), int(routing.experts[t, j]) // 2) for t, j in routing.kept.nonzero()}
    first = next(entry for entry in traffic if entry.operation == "all_to_all" and entry.dtype is torch.float64)
    return first.nbytes / (8 * HIDDEN), int(routing.kept.sum()), len(pairs)


def test_flex_sends_a_token_once_to_a_rank(pool: Pool) -> None:
    for dispatcher, which in (("alltoall", 1), ("flex", 2)):
        for counts in pool.run(rows_sent, 4, dispatcher):
            assert counts[2] < counts[1] and counts[0] == counts[which], (dispatcher, counts)
