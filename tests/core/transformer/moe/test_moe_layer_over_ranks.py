"""A layer of experts that ranks share: what is sent, and what fp8 is told. tests/parity compares the numbers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool
from torch import Tensor, nn

from megatron.core.backends import backend_of_layer, choose_backend
from megatron.core.communication.traffic import recorded
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.parameters import initialize_parameters, name_parameters
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import DISPATCHERS, MoELayer, MoESubmodules
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, LENGTH, ROWS = 8, 6, 2


def build(settings: dict[str, Any], groups: ProcessGroupCollection | None, grouped: bool, tp: int = 1) -> nn.Module:
    config = TransformerConfig(
        **{"num_layers": 1, "num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 12} | settings,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=4,
        moe_aux_loss_coeff=0.1,
        fp64=True,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        init_method_std=0.5,
    )
    model = nn.Module()
    parts = MoESubmodules(experts=GroupedMLP if grouped else SequentialMLP)
    model.mlp = MoELayer(config, parts, layer_number=1, pg_collection=groups)
    name_parameters(model)
    initialize_parameters(model, 3)
    for parameter in model.parameters():  # biases too
        with torch.no_grad():
            parameter += 0.1 * torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape).sin()
    return model


def micro_batch(number: int) -> tuple[Tensor, Tensor]:
    """Inputs and what the outputs count by, [t, h]."""
    generator = torch.Generator().manual_seed(number)
    shape = (2, LENGTH * ROWS, HIDDEN)
    inputs, weights = torch.randn(shape, dtype=torch.float64, generator=generator)
    return inputs, weights


def run(model: nn.Module, inputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and gradient of the inputs; parameters' gradients add up."""
    inputs = inputs.clone().requires_grad_()
    output, bias = model.mlp(inputs, LayerInputs(Tokens(LENGTH, ROWS)))
    assert bias is None
    (output * weights).sum().backward()
    return output.detach(), inputs.grad


def sources(dispatcher: str, precision: dict[str, Any], etp: int) -> tuple[list[int], list[list[int]] | None]:
    """Returns the rows of each expert of this rank, and how many of them each source sent, if the experts are told."""
    groups = ProcessGroupCollection.from_grid(RankGrid(4, expert=4 // etp, expert_tensor=etp), dist.get_rank())
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=8, moe_token_dispatcher_type=dispatcher,
        moe_router_topk=2, bf16=True, expert_model_parallel_size=4 // etp, **precision,
    )  # fmt: skip
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
    model = build({"moe_token_dispatcher_type": dispatcher}, groups, grouped=True)
    with recorded() as traffic:
        run(model, *micro_batch(groups.rank("dp")))
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
    settings = {"moe_token_dispatcher_type": dispatcher, "moe_router_topk": 4, "moe_expert_capacity_factor": 0.8}
    model = build(settings, groups, grouped=True)
    inputs, weights = micro_batch(groups.rank("dp"))
    with recorded() as traffic:
        run(model, inputs, weights)
    routing = model.mlp.router.route(inputs, LayerInputs(Tokens(LENGTH, ROWS)))
    assert routing.kept is not None
    pairs = {(int(t), int(routing.experts[t, j]) // 2) for t, j in routing.kept.nonzero()}
    first = next(entry for entry in traffic if entry.operation == "all_to_all" and entry.dtype is torch.float64)
    return first.nbytes / (8 * HIDDEN), int(routing.kept.sum()), len(pairs)


def test_flex_sends_a_token_once_to_a_rank(pool: Pool) -> None:
    for dispatcher, which in (("alltoall", 1), ("flex", 2)):
        for counts in pool.run(rows_sent, 4, dispatcher):
            assert counts[2] < counts[1] and counts[0] == counts[which], (dispatcher, counts)
