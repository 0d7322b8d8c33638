"""Swapped experts: training steps with them against one process, in float64."""

import multiprocessing
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gpus import two_ranks
from support.pool import Pool
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters import info_of
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tokens import Tokens
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH, VOCABULARY, EXPERTS, MICRO_BATCHES, STEPS = 16, 40, 8, 4, 5


def build(groups: ProcessGroupCollection, dispatcher: str, **settings: Any) -> GPTModel:
    sizes = groups.size("ep"), groups.size("expt_tp"), groups.size("tp")
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_ffn_hidden_size=12,
        moe_grouped_gemm=True,
        moe_aux_loss_coeff=0.01,
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=sizes[0],
        expert_tensor_parallel_size=sizes[1],
        tensor_model_parallel_size=sizes[2],
        sequence_parallel=sizes[2] > 1,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        fp64=True,
        seed=5,
        finalize_model_grads_func=finalize_model_grads,
        **settings,
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=True)
    model = GPTModel(config, spec, VOCABULARY, LENGTH, pg_collection=groups, vocab_padding_multiple=8)
    for module in model.modules():
        if isinstance(module, MoELayer):
            with torch.no_grad():  # most tokens choose experts of the first half
                module.router.weight[: EXPERTS // 2] *= 8.0
    return model


def losses_of(model: nn.Module, step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    ids = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator).to(next(model.parameters()).device)
    losses: Tensor = model(ids[:, :-1], None, None, labels=ids[:, 1:], tokens=Tokens(LENGTH, 2))
    return losses.mean()


def train(
    world: int, layout: dict[str, int], dispatcher: str, sharded: bool = False, device: str = "cpu", **settings: Any
) -> list[dict[str, Any]]:
    """Returns for each step the weights, and the rows that this rank's experts computed each time."""
    groups = ProcessGroupCollection.from_grid(RankGrid(world, **layout), dist.get_rank())
    model = build(groups, dispatcher, **settings).to(device)
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=sharded
    )
    ddp = DistributedDataParallel(model.config, options, model, pg_collection=groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.02, clip_grad=0.5), [ddp])
    rows: list[int] = []
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    for layer in layers:
        layer.experts.register_forward_hook(lambda experts, inputs, output: rows.append(output.shape[0]))
    replicas, replica = groups.size("dp"), groups.rank("dp")

    def forward_step(numbers: Iterator[int], chunk: nn.Module, step: int) -> tuple[Tensor, Any]:
        loss = losses_of(chunk, step, next(numbers) * replicas + replica)
        return loss, lambda output: (output, {"lm loss": output.detach()})

    seen = []
    for step in range(STEPS):
        rows.clear()
        ddp.zero_grad_buffer()
        get_forward_backward_func(pp_size=1)(
            forward_step_func=partial(forward_step, step=step),
            data_iterator=iter(range(MICRO_BATCHES)),
            model=ddp,
            num_microbatches=MICRO_BATCHES // replicas,
        )
        optimizer.step_on_device(torch.tensor(True, device=device))
        with ddp.whole_weights():
            weights = {info_of(p).name: (p.detach().to("cpu", copy=True), info_of(p)) for p in ddp.parameters()}
        seen.append({"weights": weights, "rows": [*rows]})
    return seen


BALANCED = {"moe_balanced_expert_placement": True}
CASES = {
    "ep2, allgather": ({"expert": 2}, 2, "allgather", {}),
    "ep2, alltoall, recomputed": (
        {"expert": 2},
        2,
        "alltoall",
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "ep2, flex, turns": (
        {"expert": 2},
        2,
        "flex",
        {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
    ),
    "ep4, allgather, late": ({"expert": 4}, 4, "allgather", {"delay_wgrad_compute": True}),
    "ep4, allgather, recomputed": (
        {"expert": 4},
        4,
        "allgather",
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "ep2 etp2, alltoall": ({"tensor": 2, "expert": 2, "expert_tensor": 2}, 4, "alltoall", {}),
}


@pytest.fixture(scope="module")
def expected(pool: Pool) -> list[dict[str, Any]]:
    return pool.run(train, 1, 1, {}, "allgather")[0]


def fullest_rows(ranks: list[list[dict[str, Any]]], step: int) -> list[int]:
    """Returns the rows of the fullest rank each time that experts compute."""
    return [max(of_ranks) for of_ranks in zip(*(rank[step]["rows"] for rank in ranks), strict=True)]


@pytest.mark.fast("ep2, flex, turns")
@pytest.mark.parametrize("name", CASES)
def test_steps_with_swapped_experts_equal_those_of_one_process(
    name: str, pool: Pool, expected: list[dict[str, Any]]
) -> None:
    layout, world, dispatcher, settings = CASES[name]
    sharded = "recomputed" not in name
    ranks = pool.run(partial(train, **BALANCED, **settings), world, world, layout, dispatcher, sharded)
    at_home = pool.run(partial(train, **settings), world, world, layout, dispatcher, sharded)
    fullest, without = (sum(sum(fullest_rows(each, step)) for step in range(STEPS)) for each in (ranks, at_home))
    even = sum(sum(rank[step]["rows"]) for rank in ranks for step in range(STEPS)) / world
    left = 0.5 if layout["expert"] == 2 else 0.8  # each of four ranks has two experts only
    assert fullest - even < left * (without - even), (fullest, without, even)
    check_weights(ranks, expected)


def check_weights(ranks: list[list[dict[str, Any]]], expected: list[dict[str, Any]]) -> None:
    """Checks that the weights of each rank are its part of the expected ones, after every step."""
    for step, seen in enumerate(expected):
        for rank in ranks:
            for key, (weight, info) in rank[step]["weights"].items():
                place = zip(info.box.start, info.box.shape, strict=True)
                whole = seen["weights"][key][0].view(info.global_shape)
                part = whole[tuple(slice(start, start + count) for start, count in place)]
                difference = (weight.view(info.box.shape) - part).norm() / part.norm()
                assert difference < 1e-11, (step, key, difference)


@pytest.mark.gpu
@two_ranks
def test_steps_with_swapped_experts_over_nccl() -> None:
    context = multiprocessing.get_context("spawn")  # a process that was forked cannot use CUDA where its parent has
    with Pool(2, device="cuda", backend="cpu:gloo,cuda:nccl", context=context) as gpus:
        expected = gpus.run(partial(train, device="cuda"), 1, 1, {}, "allgather")[0]
        for name in (
            "ep2, allgather",
            "ep2, alltoall, recomputed",
            "ep2, flex, turns",
        ):
            layout, world, dispatcher, settings = CASES[name]
            run = partial(train, **BALANCED, **settings, device="cuda")
            check_weights(gpus.run(run, world, world, layout, dispatcher, True), expected)


def swaps_of_steps(steps: list[int]) -> list[list[list[int]]]:
    """Returns for each of the steps, whose weights are alike, the expert in each position of both layers."""
    groups = ProcessGroupCollection.from_grid(RankGrid(2, expert=2), dist.get_rank())
    model = build(groups, "allgather", moe_balanced_expert_placement=True)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model, pg_collection=groups)
    found = []
    for step in steps:
        ddp.zero_grad_buffer()
        for number in range(2):  # the second micro-batch changes nothing
            losses_of(ddp, step, 2 * number + dist.get_rank()).backward()
            tables = [placement.positions(None).table for placement in ddp._placements.placements]
            found.append([table.expert.tolist() for table in tables if table is not None])
        assert found[-2] == found[-1]
        ddp.finish_grad_sync()
        assert all(placement.positions(None).table is None for placement in ddp._placements.placements)
    return found[::2]


def test_swaps_depend_on_the_first_micro_batch_of_their_step_alone(pool: Pool) -> None:
    swaps, of_last = (pool.run(swaps_of_steps, 2, steps)[0] for steps in ([0, 1, 2], [2]))
    assert len({str(of_step) for of_step in swaps}) == 3
    assert swaps[-1:] == of_last


def refusal(world: int, layout: dict[str, int], grouped: bool) -> str:
    groups = ProcessGroupCollection.from_grid(RankGrid(world, **layout), dist.get_rank())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_grouped_gemm=True,
        moe_balanced_expert_placement=True,
        expert_model_parallel_size=2,
    )
    with pytest.raises(UserError) as caught:
        MoELayer(config, MoESubmodules(experts=GroupedMLP if grouped else SequentialMLP), pg_collection=groups)
    return str(caught.value)


def test_what_cannot_be_swapped_is_refused(pool: Pool) -> None:
    assert "2 data parallel ranks share the gradients" in pool.run(refusal, 4, 4, {"expert": 2}, True)[0]
    assert "which SequentialMLP does not have" in pool.run(refusal, 2, 2, {"expert": 2}, False)[0]
