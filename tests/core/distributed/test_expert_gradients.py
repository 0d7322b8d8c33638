"""Gradients of experts that one rank alone reduces: against one process, and when they get their factor."""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from support import fake_transformer_engine as fake
from support.processes import run_on_ranks
from torch import Tensor, nn

from megatron.core import backends
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.main_grad import BufferMainGrad
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.parameters import (
    ParameterInfo,
    info_of,
    initialize_parameters,
    main_grad_accumulator,
    name_parameters,
)
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

SAMPLES = 2


def build(kind: str, per_token: bool, groups: ProcessGroupCollection, **settings: bool) -> DistributedDataParallel:
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
    return DistributedDataParallel(config, DistributedDataParallelConfig(**settings), model, pg_collection=groups)


def loss(ddp: DistributedDataParallel, sample: int) -> Tensor:
    generator = torch.Generator().manual_seed(sample)
    inputs = torch.randn(12, 8, dtype=torch.float64, generator=generator).requires_grad_()
    return ddp.module.mlp(inputs, LayerInputs(Tokens(6, 2)))[0].pow(2).sum()


def gradients(ranks: int, rank: int, kind: str, per_token: bool) -> list[tuple[ParameterInfo, Tensor, Tensor]]:
    """Returns for each parameter its main gradient before and after the reduction. Ranks divide the samples."""
    ddp = build(kind, per_token, ProcessGroupCollection.from_grid(RankGrid(ranks, expert=ranks), rank))
    ddp.zero_grad_buffer()
    for sample in range(rank, SAMPLES, ranks):
        with ddp.defer_weight_gradients(sample):
            loss(ddp, sample).backward()
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


def later_step(ddp: DistributedDataParallel, samples: Sequence[int]) -> dict[str, Tensor]:
    """Runs a step, fills all gradients with NaN, and returns those of the next step with these samples."""
    for step_samples in (range(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0, 2), samples):
        for parameter in ddp.parameters():
            parameter.main_grad.fill_(float("nan"))
        ddp.zero_grad_buffer()
        left = {info_of(p).name for p in ddp.parameters() if p.main_grad.isnan().any()}
        for number, sample in enumerate(step_samples):
            with nullcontext() if number + 1 == len(step_samples) else ddp.no_sync():
                loss(ddp, sample).backward()
        ddp.finish_grad_sync(force_all_reduce=True)
    assert len(left) == 2 and all("linear_fc" in name and "weight" in name for name in left), left
    return {info_of(p).name: p.main_grad.clone() for p in ddp.parameters()}


def one_process() -> ProcessGroupCollection:
    return ProcessGroupCollection.from_grid(RankGrid(1), 0)


@pytest.mark.parametrize("samples", [(0,), (0, 1), (1, 0, 2)])
def test_the_first_product_of_a_step_replaces_the_gradient_of_the_step_before(samples: tuple[int, ...]) -> None:
    found = later_step(build("grouped", False, one_process()), samples)
    first = build("grouped", False, one_process())
    first.zero_grad_buffer()
    for sample in samples:
        loss(first, sample).backward()
    for parameter in first.parameters():
        assert parameter.main_grad.any() and torch.equal(found[info_of(parameter).name], parameter.main_grad)


def test_experts_that_a_step_does_not_use_have_no_gradient() -> None:
    assert not any(gradient.any() for gradient in later_step(build("grouped", False, one_process()), ()).values())


def test_other_contributions_than_products_begin_at_zero() -> None:
    ddp = build("grouped", False, one_process())
    later_step(ddp, (0,))
    ddp.zero_grad_buffer()
    for parameter in ddp.parameters():
        main_grad = main_grad_accumulator(parameter)
        assert isinstance(main_grad, BufferMainGrad)
        main_grad.add(torch.full_like(parameter, 3.0))
        assert (parameter.main_grad == 3.0).all()
    loss(ddp, 0).backward()
    expected = later_step(ddp, (0,))
    ddp.zero_grad_buffer()
    ddp.zero_outdated_gradients()
    assert not any(parameter.main_grad.any() for parameter in ddp.parameters())
    loss(ddp, 0).backward()
    assert all(torch.equal(p.main_grad, expected[info_of(p).name]) for p in ddp.parameters())


def later_steps_on_ranks(settings: dict[str, bool]) -> list[tuple[ParameterInfo, Tensor]]:
    rank = torch.distributed.get_rank()
    ddp = build("grouped", False, ProcessGroupCollection.from_grid(RankGrid(2), rank), **settings)
    found = later_step(ddp, (rank,))
    return [(info_of(parameter), found[info_of(parameter).name]) for parameter in ddp.parameters()]


@pytest.mark.parametrize(
    "settings", [{"overlap_grad_reduce": True}, {"overlap_grad_reduce": True, "use_distributed_optimizer": True}]
)
def test_a_later_step_on_two_ranks_agrees_with_one(settings: dict[str, bool]) -> None:
    expected = later_step(build("grouped", False, one_process()), (0, 1))
    for seen in run_on_ranks(later_steps_on_ranks, 2, settings):
        for info, gradient in seen:
            wanted = expected[info.name] / 2
            assert (gradient - wanted).abs().max() / wanted.abs().max() < 1e-11, info.name
