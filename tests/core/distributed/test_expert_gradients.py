"""Gradients of experts that one rank alone reduces: against one process, and when they get their factor."""

import pytest
import torch
from support import fake_transformer_engine as fake
from support.processes import run_on_ranks
from torch import Tensor, nn

from megatron.core import backends
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.parameters import ParameterInfo, info_of, initialize_parameters, name_parameters
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

SAMPLES = 2


def build(kind: str, per_token: bool, groups: ProcessGroupCollection) -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=12,
        transformer_impl="transformer_engine" if kind == "engine" else "local",
        fp64=True,
        init_method_std=0.5,
        calculate_per_token_loss=per_token,
    )
    model = nn.Module()
    parts = MoESubmodules(experts=SequentialMLP if kind == "sequential" else GroupedMLP)
    found, backends.find_engine = backends.find_engine, lambda: fake.FAKE
    try:
        model.mlp = MoELayer(config, parts, layer_number=1, pg_collection=groups)
    finally:
        backends.find_engine = found
    name_parameters(model)
    initialize_parameters(model, 3)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model, pg_collection=groups)


def gradients(ranks: int, rank: int, kind: str, per_token: bool) -> list[tuple[ParameterInfo, Tensor, Tensor]]:
    """Returns for each parameter its main gradient before and after the reduction. Ranks divide the samples."""
    ddp = build(kind, per_token, ProcessGroupCollection.from_grid(RankGrid(ranks, expert=ranks), rank))
    ddp.zero_grad_buffer()
    for sample in range(rank, SAMPLES, ranks):
        generator = torch.Generator().manual_seed(sample)
        inputs = torch.randn(12, 8, dtype=torch.float64, generator=generator).requires_grad_()
        with ddp.defer_weight_gradients(sample):
            ddp.module.mlp(inputs, LayerInputs(Tokens(6, 2)))[0].pow(2).sum().backward()
        ddp.compute_weight_gradients(sample)
    before = [parameter.main_grad.clone() for parameter in ddp.parameters()]
    ddp.finish_grad_sync()
    return [(info_of(p), early, p.main_grad) for p, early in zip(ddp.parameters(), before, strict=True)]


def gradients_on_ranks(kind: str, per_token: bool) -> list[tuple[ParameterInfo, Tensor, Tensor]]:
    return gradients(torch.distributed.get_world_size(), torch.distributed.get_rank(), kind, per_token)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("kind", ["grouped", "sequential", "engine"])
def test_the_factor_comes_with_the_contributions_and_not_with_a_reduction(kind: str, per_token: bool) -> None:
    expected = {info.name: summed for info, _, summed in gradients(1, 0, "grouped", per_token)}
    for seen in run_on_ranks(gradients_on_ranks, 2, kind, per_token):
        assert {info.name for info, _, _ in seen} == expected.keys()
        for info, before, after in seen:
            place = tuple(slice(at, at + extent) for at, extent in zip(info.box.start, info.box.shape, strict=True))
            wanted = expected[info.name].view(info.global_shape)[place] / (1 if per_token else SAMPLES)
            error = (after.view(info.box.shape) - wanted).abs().max() / expected[info.name].abs().max()
            assert wanted.any() and error < 1e-11, info.name
            if info.grid == "expert":  # Transformer Engine multiplies by no factor, so the reduction does
                assert torch.equal(before, after) == (kind != "engine" or per_token), info.name
