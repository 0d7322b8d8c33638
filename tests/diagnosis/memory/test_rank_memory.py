"""What each rank is said to hold is what it holds in a real world of that layout, to the byte where it can be."""

import gc
import math
import shlex
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.command_lines import configured, megatron_lm_commands, smallest_world
from support.processes import run_on_ranks
from support.runs import GPT
from torch import nn

from megatron.core.adapters.nf4 import store_in_nf4
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.reduce_scatter_gradients import TransientGradients
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.initializers import Normal
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops.fp8.block_recipes import build_scaling
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.recipes import Fp8Settings, LinearSplit, Role
from megatron.core.optimizer import get_megatron_optimizer, host_state
from megatron.core.parameters import Box, declare
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils.scratch_file import BLOCK, ScratchFile, padded
from megatron.data.tokenizer.build import build_tokenizer, padded_vocab_size
from megatron.data.tokenizer.null import NullTokenizer
from megatron.diagnosis.memory.rank_memory import (
    RankMemory,
    build_shard,
    memory_of_shard,
    parameters_of_model,
    rank_memory,
)
from megatron.facades import parallel_state
from megatron.facades.global_vars import published
from megatron.facades.script_providers import providers_of_user_script
from megatron.training import get_args, loop
from megatron.training.adapters import with_adapters
from megatron.training.arguments import configure, core_transformer_config_from_args
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.launch.environment import Environment, groups_of_rank
from megatron.training.providers import Context, Providers, stages_of_rank
from megatron.training.setup.model import parallelize
from megatron.training.state import TrainState
from pretrain_gpt import build_model

PROVIDERS = Providers(build_model, lambda context, counts: [], lambda context: lambda data, model: None)  # type: ignore[arg-type,return-value]


def held(config: PretrainConfig, providers: Providers = PROVIDERS) -> list[RankMemory]:
    return rank_memory(
        config, with_adapters(config, providers), build_tokenizer(config.tokenizer), config.tokenizer.vocab_size or 1
    )


def bytes_alive() -> int:
    """Returns the bytes of all tensors on the CPU that were made since `gc.freeze` and are alive."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # Not isinstance: that asks weak proxies, which may be dead, for the class they stand for.
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def bytes_of_a_real_run(config: PretrainConfig, rank: int = 0) -> int:
    """What model, gradients and optimizer of a set-up run take, counted over all tensors that it leaves alive."""
    gc.collect()
    gc.freeze()
    groups = groups_of_rank(config, rank)
    environment = Environment(rank, config.world_size, torch.device("cpu"), groups)
    context = Context(config, environment, build_tokenizer(config.tokenizer), TrainState())
    stages = stages_of_rank(config, groups.rank("pp"))
    build = with_adapters(config, PROVIDERS).build_model
    model = [parallelize(build(context, stage), config, environment) for stage in stages]
    optimizer = get_megatron_optimizer(config.optimizer, model, pg_collection=groups)
    if config.adapters.lora_base_weights == "nf4":
        for chunk in model:
            store_in_nf4(chunk)
    taken = bytes_alive()
    del model, optimizer
    if config.world_size > 1:
        dist.barrier()  # no rank closes a group that another one still connects to
    groups.close()
    return taken


def kept(entry: RankMemory) -> int:
    """Bytes that stay from step to step. fp8 layers quantise their weights in the first one."""
    return entry.memory.total - entry.memory.gathered - entry.memory.quantized


@pytest.mark.parametrize(
    "flags",
    [
        "--hidden-size 128 --vocab-size 5000",
        "--hidden-size 128 --vocab-size 5000 --bf16 --ema-decay 0.99",
        "--hidden-size 128 --vocab-size 5000 --bf16 --deterministic-mode --exact-data-parallel-sums "
        "--global-batch-size 8",
        "--hidden-size 128 --vocab-size 5000 --bf16 --optimizer sgd --untie-embeddings-and-output-weights",
        "--hidden-size 128 --vocab-size 5000 --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype fp8",
        "--hidden-size 192 --vocab-size 999 --fp64 --swiglu --disable-bias-linear --position-embedding-type rope",
        "--hidden-size 128 --vocab-size 77 --fp16 --group-query-attention --num-query-groups 2 --qk-layernorm",
        "--hidden-size 128 --vocab-size 77 --bf16 --lora-rank 8 --use-dora --load-hf .",
        "--hidden-size 128 --vocab-size 77 --bf16 --fp8-format e4m3",
        "--hidden-size 128 --vocab-size 77 --bf16 --fp8-format e4m3 --fp8-param-gather",
        "--hidden-size 128 --vocab-size 77 --bf16 --fp8-format e4m3 --fp8-param-gather --use-precision-aware-optimizer",
        "--hidden-size 128 --vocab-size 77 --fp8-format e4m3 --fp8-param-gather --first-last-layers-bf16 "
        "--num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 0",
    ],
)
def test_bytes_are_those_of_a_real_run(flags: str) -> None:
    config = configured(flags)
    (entry,) = held(config)
    assert bytes_of_a_real_run(config) == pytest.approx(kept(entry), rel=0.02)


OFFLOADED = "--hidden-size 128 --vocab-size 5000 --bf16 --optimizer-cpu-offload --optimizer-offload-fraction"


@pytest.mark.parametrize("flags", ["0.5", "1.0", "1.0 --use-precision-aware-optimizer --exp-avg-dtype fp8"])
def test_bytes_of_offloaded_state(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In host memory, and in a file with buffers in host memory. Without a GPU both count as alive."""
    monkeypatch.setattr(host_state, "PIECE", 1 << 12)
    (inside,) = held(configured(f"{OFFLOADED} {flags}"))
    assert not inside.memory.file
    assert bytes_of_a_real_run(configured(f"{OFFLOADED} {flags}")) == pytest.approx(
        kept(inside) + inside.memory.host, rel=0.02
    )
    config = configured(f"{OFFLOADED} {flags} --optimizer-nvme-offload-path {tmp_path}")
    (entry,) = held(config)
    assert entry.memory.total == inside.memory.total and entry.memory.host < inside.memory.host / 10
    sizes = []

    def noting(self: ScratchFile, *arguments: Any) -> int:
        offset = reserve(self, *arguments)
        sizes.append(self.nbytes)
        return offset

    reserve = ScratchFile.reserve
    monkeypatch.setattr(ScratchFile, "reserve", noting)
    assert bytes_of_a_real_run(config) == pytest.approx(kept(entry) + entry.memory.host, rel=0.02)
    assert sizes[-1] == entry.memory.file >= inside.memory.host


def test_weights_in_a_file(tmp_path: Path) -> None:
    """On the device are the two largest shards. tests/core/distributed/test_weight_file.py measures real ranks."""
    flags = "--bf16 --num-layers 6 --hidden-size 128 --vocab-size 77 --use-torch-fsdp2"
    (plain,) = {entry.memory for entry in held(configured(flags, ranks=4))}
    (entry, *_) = held(configured(f"{flags} --param-nvme-offload-path {tmp_path}", ranks=4))
    memory = entry.memory
    sizes = sorted(plan.numel // 4 * 2 for plan in entry.shard.plans[0])
    assert sum(sizes) == plain.weights and len(sizes) == 8
    assert memory.weights == sum(sizes[-2:]) < plain.weights / 2
    assert memory.file == memory.weights_file == BLOCK + sum(map(padded, sizes))
    assert memory.host == 3 * (padded(sizes[-1]) + BLOCK)
    assert plain.local_copy == plain.weights + plain.optimizer <= memory.local_copy <= plain.local_copy + 9 * BLOCK
    (both, *_) = held(configured(f"{flags} --optimizer-cpu-offload --param-nvme-offload-path {tmp_path}", ranks=4))
    assert both.memory.host == memory.host + plain.optimizer and both.memory.local_copy == memory.local_copy


@pytest.mark.parametrize("low", ["--fp8-format hybrid --fp8-recipe mxfp8", "--fp4-format e2m1"])
def test_scales_of_small_blocks_count(low: str) -> None:
    (entry,) = held(configured(f"--hidden-size 128 --vocab-size 77 --bf16 {low}"))
    weight = torch.randn(128, 256)
    settings = Fp8Settings("mxfp8" if "mxfp8" in low else "nvfp4", FORMATS["e4m3"])
    scaling = build_scaling(settings, LinearSplit(), weight.device)
    pair = scaling.quantize(weight, Role.WEIGHTS, rows=True, columns=True, records=True)
    kept = sum(part.nbytes for layout in (pair.rows, pair.columns) for part in (layout.values, layout.factors))
    (plain,) = held(configured("--hidden-size 128 --vocab-size 77 --bf16 --fp8-format e4m3"))
    assert entry.memory.quantized / plain.memory.quantized == kept / (2 * weight.numel())


LAYOUTS = [
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16",
    "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --num-layers 4",
    "--use-distributed-optimizer --num-distributed-optimizer-instances 2 --bf16",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --bf16 --context-parallel-size 2",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --bf16 --deterministic-mode "
    "--exact-data-parallel-sums",
    "--use-torch-fsdp2 --bf16 --tensor-model-parallel-size 2 --lora-rank 8 --load-hf .",
    "--use-torch-fsdp2 --bf16 --lora-rank 8 --lora-base-weights nf4 --lora-target-modules q_proj linear_fc1 "
    "--load-hf .",
    "--use-torch-fsdp2 --bf16 --lora-rank 8 --moe-grouped-gemm --num-experts 8 --expert-model-parallel-size 2 "
    "--load-hf .",
    "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|t|mm|L --num-layers 2 --mtp-num-layers 2",
    "--num-experts 8 --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --bf16",
]
ALIKE = [
    "--tensor-model-parallel-size 4 --sequence-parallel --group-query-attention --num-query-groups 2",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 --bf16",
    "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 --num-layers 7 "
    "--untie-embeddings-and-output-weights",
    "--use-distributed-optimizer --bf16",
    "--use-torch-fsdp2 --bf16 --tensor-model-parallel-size 2",
    "--bf16 --lora-rank 8 --lora-base-weights nf4 --load-hf .",
]
"""Layouts that divide a model as others do."""
SIZES = "--hidden-size 128 --vocab-size 5001 --global-batch-size 8"


def bytes_of_real_ranks(layouts: list[str]) -> list[int]:
    return [bytes_of_a_real_run(configured(f"{SIZES} {flags}", ranks=4), dist.get_rank()) for flags in layouts]


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(ALIKE, marks=pytest.mark.slow)], ids=["each", "alike"])
def test_bytes_are_those_of_real_ranks_under_every_layout(layouts: list[str]) -> None:
    real = run_on_ranks(bytes_of_real_ranks, 4, layouts)
    for number, flags in enumerate(layouts):
        for rank, entry in enumerate(held(configured(f"{SIZES} {flags}", ranks=4))):
            assert real[rank][number] == pytest.approx(kept(entry), rel=0.02), (flags, rank)


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --use-torch-fsdp2",
    ],
)
def test_ranks_that_share_a_build_would_each_have_built_the_same(flags: str) -> None:
    config = configured(f"--num-layers 4 --vocab-size 1001 --global-batch-size 16 {flags}", ranks=16)
    tokenizer = build_tokenizer(config.tokenizer)
    found = held(config)
    assert len({id(entry.shard) for entry in found}) < 16
    for entry in found:
        own = build_shard(config, PROVIDERS, tokenizer, 1001, entry.rank)
        assert own.stages == entry.shard.stages
        described = [[(p.name, p.numel, p.dtype, [s.info for s in p.slots]) for p in plans] for plans in own.plans]
        assert described == [
            [(p.name, p.numel, p.dtype, [s.info for s in p.slots]) for p in plans] for plans in entry.shard.plans
        ]
        assert memory_of_shard(own, config) == entry.memory


@pytest.mark.parametrize("vocabulary", [1000, 1001])
def test_the_model_is_the_same_under_every_layout(vocabulary: int) -> None:
    sizes = f"--num-layers 4 --vocab-size {vocabulary} --global-batch-size 16 --swiglu --group-query-attention "
    sizes += "--num-query-groups 2"
    whole = parameters_of_model(entry.shard for entry in held(configured(sizes, ranks=8)))
    for flags in (
        "--tensor-model-parallel-size 4",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --context-parallel-size 2",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t||ttL --use-torch-fsdp2",
    ):
        assert parameters_of_model(h.shard for h in held(configured(f"{sizes} {flags}", ranks=8))) == whole, flags


def test_parts_of_memory() -> None:
    """In bytes a parameter: 2 of weights, 4 of gradients, 12 of optimizer; what is shared out by four, a quarter."""
    model = "--bf16 --num-layers 4 --vocab-size 1001 --untie-embeddings-and-output-weights"

    def memory(flags: str) -> tuple[float, ...]:
        (one,) = {entry.memory for entry in held(configured(f"{model} {flags}", ranks=4))}
        plain = held(configured(model))[0].memory.weights // 2
        return tuple(round(size / plain, 1) for size in (one.weights, one.gradients, one.optimizer))

    fsdp = "--use-megatron-fsdp --data-parallel-sharding-strategy"
    assert memory("") == (2, 4, 12)
    assert memory("--use-distributed-optimizer") == memory(f"{fsdp} optim") == (2, 4, 3)
    assert memory("--use-distributed-optimizer --num-distributed-optimizer-instances 2") == (2, 4, 6)
    assert memory(f"{fsdp} optim_grads") == (2, 1, 3)
    assert memory(f"{fsdp} optim_grads_params") == (0.5, 1, 3)
    lora = f"{model} --lora-rank 1 --load-hf . --lora-target-modules linear_proj"
    assert memory(lora) == memory(f"{lora} {fsdp} optim_grads") == (2, 0, 0)
    assert memory(f"{lora} {fsdp} optim_grads_params") == (0.5, 0, 0)


PASSING = [
    "--use-torch-fsdp2 --overlap-param-gather --overlap-grad-reduce --untie-embeddings-and-output-weights",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
    "--use-torch-fsdp2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce",
    "--use-torch-fsdp2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-v --overlap-param-gather",
    "--use-torch-fsdp2 --pipeline-model-parallel-size 2 --overlap-param-gather --mtp-num-layers 2",
    "--use-torch-fsdp2 --pipeline-model-parallel-size 2 --mtp-num-layers 3",
    "--use-torch-fsdp2 --num-experts 8 --expert-model-parallel-size 2",
    "--use-torch-fsdp2 --num-experts 8 --expert-model-parallel-size 2 --overlap-param-gather --overlap-grad-reduce",
]
TRAINED = (
    "--hidden-size 64 --vocab-size 1001 --seq-length 16 --global-batch-size 16 --num-layers 8 --bf16 --train-iters 2 "
    "--eval-iters 0 --num-workers 0"
)


def bytes_that_pass(layouts: list[str]) -> list[int]:
    """Whole weights and whole gradients of shared units in two steps, each at its most, together."""
    return [_bytes_that_pass(configured(f"{TRAINED} {flags}", ranks=4)) for flags in layouts]


def _bytes_that_pass(config: PretrainConfig) -> int:
    buffers: dict[str, list[torch.Tensor]] = {"weights": [], "gradients": []}
    most = dict.fromkeys(buffers, 0)

    def watched(method: Any, kind: str, name: str) -> Any:
        def call(self: Any) -> None:
            method(self)
            mine = getattr(self, name)
            if not any(mine is known for known in buffers[kind]):
                buffers[kind].append(mine)
            most[kind] = max(most[kind], sum(buffer.untyped_storage().nbytes() for buffer in buffers[kind]))

        return call

    gather, opening = Unit.start_all_gather, TransientGradients.open
    sharded = config.ddp.data_parallel_sharding_strategy == "optim_grads_params"
    with (
        mock.patch.object(Unit, "start_all_gather", watched(gather, "weights", "param_buffer")),
        mock.patch.object(TransientGradients, "open", watched(opening, "gradients", "whole")),
    ):
        loop.run_pretraining(config, GPT, time.monotonic())
    return most["weights"] * sharded + most["gradients"]


@pytest.mark.slow
def test_what_passes_within_a_step_is_what_real_ranks_have_at_their_most() -> None:
    real = run_on_ranks(bytes_that_pass, 4, PASSING)
    for number, flags in enumerate(PASSING):
        for rank, entry in enumerate(held(configured(f"{TRAINED} {flags}", ranks=4))):
            assert real[rank][number] <= entry.memory.gathered <= 1.1 * real[rank][number], (flags, rank)


@pytest.mark.parametrize(
    ("layers", "least", "every"),
    [
        (range(1, 25), 40, 10),
        pytest.param(range(1, 25), 40, 1, marks=pytest.mark.slow),
        pytest.param(range(25, 1000), 4, 1, marks=pytest.mark.slow),
    ],
)
def test_every_megatron_lm_command_that_is_accepted_builds_its_model_on_every_rank(
    layers: range, least: int, every: int
) -> None:
    """Whole, that is: every element of every tensor on some rank. Deep models repeat the layers of others. `make test`
    builds every tenth model."""
    built: dict[str, str] = {}
    for command in megatron_lm_commands():
        words = shlex.split(command["command"])
        try:
            config = configure(words, launch_environment=LaunchEnvironment(smallest_world(words), True))
        except ConfigurationError:
            continue
        # Kernels are the affair of a machine with GPUs; what ranks hold does not depend on them.
        config.transformer.attention_backend = AttnBackend.auto
        same = f"{config.transformer} {config.model} {config.ddp} {config.grid}"
        if same not in built and config.transformer.num_layers in layers:
            built[same] = command["source"]
            if len(built) % every:
                continue
            assert len(rank_memory(config, PROVIDERS, NullTokenizer(1000, None, None), 1024)) == config.world_size
    assert len(built) >= least


class HalfAModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = declare(
            nn.Parameter(torch.empty(3, 4)), Normal(1.0), global_shape=(6, 4), box=Box((0, 0), (3, 4))
        )


def test_elements_that_nobody_holds_are_an_error() -> None:
    def build(*_: Any) -> nn.Module:
        return HalfAModel()

    broken = Providers(build, PROVIDERS.build_datasets, PROVIDERS.build_forward_step)
    with pytest.raises(UserError, match=r"the ranks hold 12 elements of weight, which has 24 \(shape \[6, 4\]\)"):
        held(configured(ranks=2), broken)


def test_a_script_that_hands_on_the_padded_vocabulary_gets_the_model_of_the_true_one() -> None:
    def provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
        args = get_args()
        return GPTModel(
            core_transformer_config_from_args(args),
            get_gpt_layer_local_spec(),
            args.padded_vocab_size,
            args.max_position_embeddings,
            pre_process,
            post_process,
            share_embeddings_and_output_weights=True,
            vp_stage=vp_stage,
        )

    providers = published(providers_of_user_script(lambda counts: [], provider, lambda data, model: None))  # type: ignore[arg-type,return-value]
    flags = "--num-layers 4 --vocab-size 100 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
    config = configured(flags + "--num-virtual-stages-per-pipeline-rank 2", ranks=4)
    padded = padded_vocab_size(101, 128, 2)
    scripts = rank_memory(config, providers, build_tokenizer(config.tokenizer), padded)
    own = rank_memory(config, PROVIDERS, build_tokenizer(config.tokenizer), padded)
    assert [h.memory for h in scripts] == [h.memory for h in own]
    assert parameters_of_model(h.shard for h in scripts) == parameters_of_model(h.shard for h in own)


def test_megatron_lm_providers_find_what_they_ask_for() -> None:
    """get_args() and parallel_state, as scripts of other programs use them."""
    seen = []

    def provider(pre_process: bool = True, post_process: bool = True) -> nn.Module:
        seen.append((parallel_state.get_pipeline_model_parallel_rank(), get_args().padded_vocab_size, pre_process))
        return nn.Linear(2, 2)

    providers = published(providers_of_user_script(lambda counts: [], provider, lambda data, model: None))  # type: ignore[arg-type,return-value]
    held(configured("--pipeline-model-parallel-size 2", ranks=2), providers)
    assert seen == [(0, 100, True), (1, 100, False)]


def test_groups_of_a_dry_run_are_only_planned() -> None:
    groups = groups_of_rank(configured("--tensor-model-parallel-size 2", ranks=4), 3)
    assert isinstance(groups, ProcessGroupCollection) and groups.rank("tp") == 1
    assert math.prod((groups.size("tp"), groups.size("dp"))) == 4
