"""Whole runs with low-rank adapters: frozen weights, every layout, checkpoints of adapters alone, bad input."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.command_lines import problems_of
from support.processes import run_on_ranks
from support.runs import (
    TINY,
    Outcome,
    differences,
    state_at_end,
    state_at_start,
    train,
    train_all_on_ranks,
    train_on_ranks,
)
from torch import Tensor, nn
from training.test_layouts import check_same_run

import pretrain_hybrid
from megatron.core.adapters.nf4 import Nf4Linear
from megatron.core.dist_checkpointing.checkpoint import open_checkpoint
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.exceptions import UserError
from megatron.training.providers import Providers

SHAPE = (
    f"{TINY} --num-layers 4 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
    "--ffn-hidden-size 48 --add-qkv-bias --fp64 --hidden-dropout 0.1 --attention-dropout 0.1"
)
EXPERTS = f"{SHAPE} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.01"
WIDE = SHAPE.replace("--ffn-hidden-size 48", "--ffn-hidden-size 128") + " --hidden-size 128"
LORA = "--lora-rank 4 --lora-alpha 8"
NF4 = f"{LORA} --lora-base-weights nf4"
KINDS = {
    "LoRA": f"{LORA} --lora-dropout 0.1",
    "parts, rsLoRA": f"{LORA} --use-rslora --lora-target-modules q_proj v_proj up_proj o_proj",
    "DoRA": f"{LORA} --use-dora --lora-target-modules linear_qkv linear_proj gate_proj up_proj down_proj",
}
EXPERT_KINDS = {
    "grouped": f"{LORA} --moe-grouped-gemm",
    "one by one": f"{LORA} --lora-target-modules linear_fc1 w2 linear_proj",
}
TP2, PP2, CP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
VPP = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PARTS = "--recompute-granularity selective --recompute-modules mlp core_attn layernorm"
LAYOUTS = {
    "TP": TP2,
    "TP with SP, recomputed": f"{TP2} --sequence-parallel {FULL}",
    "PP, parts recomputed": f"{PP2} {PARTS}",
    "embedding alone": f"{PP2} --pipeline-model-parallel-layout E|ttttL",
    "VPP": VPP,
    "zb-v": f"{PP2} --pipeline-schedule zb-v",
    "CP": CP2,
    "ZeRO-1": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "ZeRO-2": f"{FSDP} optim_grads",
    "ZeRO-3, recomputed": f"{FSDP} optim_grads_params {FULL}",
    "ZeRO-3, ahead": f"{FSDP} optim_grads_params --overlap-param-gather --init-model-with-meta-device",
}
QUICK = ["TP with SP, recomputed"]
OF_FOUR = {
    "TP x PP": f"{TP2} --sequence-parallel {PP2} --use-distributed-optimizer",
    "TP x ZeRO-3": f"{TP2} {FSDP} optim_grads_params",
    "ZeRO-3 twice": f"{FSDP} optim_grads_params --num-distributed-optimizer-instances 2",
    "CP x PP": f"{CP2} {PP2}",
}
EP2 = "--expert-model-parallel-size 2"
EXPERT_LAYOUTS = {
    "EP": EP2,
    "EP, alltoall, ZeRO-1": f"{EP2} --moe-token-dispatcher-type alltoall --use-distributed-optimizer",
    "TP, whole experts": f"{TP2} --sequence-parallel {EP2} --expert-tensor-parallel-size 1",
    "divided experts": f"{TP2} --sequence-parallel",
    "ZeRO-3": f"{FSDP} optim_grads_params",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    train(f"--mock-data --train-iters 1 --save {root}", base=SHAPE)
    return root


@pytest.fixture(scope="module")
def base_of_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    train(f"--mock-data --train-iters 1 --save {root}", base=EXPERTS)
    return root


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wide")
    train(f"--mock-data --train-iters 1 --save {root}", base=WIDE)
    return root


def flags_of(base: Path, kind: str, iterations: int = 3) -> str:
    return f"--mock-data --train-iters {iterations} --pretrained-checkpoint {base} {kind}"


def check(base: Path, shape: str, kinds: Mapping[str, str], layouts: Mapping[str, str], world: int) -> None:
    """Every layout with every kind of adapters is the run of one process."""
    alone = {name: train(flags_of(base, kind), base=shape) for name, kind in kinds.items()}
    cells = [(kind, layout) for kind in kinds for layout in layouts]
    by_rank = train_all_on_ranks([f"{flags_of(base, kinds[k])} {layouts[x]}" for k, x in cells], world, base=shape)
    failed = []
    for number, (kind, layout) in enumerate(cells):
        try:
            check_same_run([outcomes[number] for outcomes in by_rank], alone[kind])
        except AssertionError as error:
            failed.append(f"{kind}, {layout}: {error}")
    assert not failed, "\n\n".join(failed)


def test_layouts_give_the_run_of_one_process(base: Path) -> None:
    check(base, SHAPE, {"DoRA": KINDS["DoRA"]}, {name: LAYOUTS[name] for name in QUICK}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout(base: Path, kind: str) -> None:
    check(base, SHAPE, {kind: KINDS[kind]}, LAYOUTS, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_four(base: Path, kind: str) -> None:
    check(base, SHAPE, {kind: KINDS[kind]}, OF_FOUR, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_experts(base_of_experts: Path, kind: str) -> None:
    check(base_of_experts, EXPERTS, {kind: EXPERT_KINDS[kind]}, EXPERT_LAYOUTS, 2)


HYBRID = (
    f"{TINY.replace('--num-layers 2', '')} --hybrid-layer-pattern M*-M --position-embedding-type none --fp64 "
    "--mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 4 --mamba-conv-kernel-dim 3 --hidden-dropout 0.1"
)


def train_hybrids(flags: list[str]) -> list[Outcome]:
    hybrid = Providers(pretrain_hybrid.build_model, pretrain_hybrid.build_datasets, pretrain_hybrid.build_forward_step)
    return [train(each, hybrid, base=HYBRID, defaults=pretrain_hybrid.DEFAULTS) for each in flags]


@pytest.mark.slow
def test_layers_of_mamba(tmp_path: Path) -> None:
    """Ranks divide in_proj by its five parts, not by its rows in order."""
    train_hybrids([f"--mock-data --train-iters 1 --save {tmp_path}"])
    both, dora = "--lora-target-modules in_proj out_proj", "--use-dora --lora-target-modules in_proj"
    layouts = [TP2, f"{TP2} --sequence-parallel", PP2, LAYOUTS["ZeRO-3, recomputed"]]
    flags = [flags_of(tmp_path, f"{LORA} {kind}") for kind in (both, dora)]
    cells = [(kind, layout) for kind in range(2) for layout in layouts]
    alone = train_hybrids(flags)
    by_rank = run_on_ranks(train_hybrids, 2, [f"{flags[kind]} {layout}" for kind, layout in cells])
    for number, (kind, _) in enumerate(cells):
        check_same_run([outcomes[number] for outcomes in by_rank], alone[kind])


# ---------------------------------------------------------------------------------------------------------------------
# Frozen weights and memory


def test_weights_stay_and_have_no_state(base: Path) -> None:
    """In bf16 the model's weights have no main weights, moments or gradients, which adapters have."""
    shape = SHAPE.replace("--fp64", "--bf16")
    run = train(flags_of(base, KINDS["parts, rsLoRA"]), base=shape)
    start, end = state_at_start([run]), state_at_end([run])
    adapted = {name for name in end if ".adapters." in name}
    frozen = end.keys() - adapted
    assert frozen and not [name for name in frozen if name.startswith("optimizer.")]
    assert all(torch.equal(start[name], end[name]) for name in frozen)
    assert {name for name in adapted if name.endswith("lora_b") and not torch.equal(start[name], end[name])}
    masters = {name for name in adapted if name.startswith("optimizer.param.")}
    assert len(masters) == len([name for name in adapted if name.startswith("weight ")]) == 4 * 4 * 2


def bytes_of_frozen_weights(flags: list[str], shape: str) -> list[tuple[int, int]]:
    """Returns for each run what this rank keeps of frozen weights between two steps, and what it has at most of those
    that are whole for a while."""
    return [_bytes_of_frozen_weights(each, shape) for each in flags]


def _bytes_of_frozen_weights(flags: str, shape: str) -> tuple[int, int]:
    models: list[DistributedDataParallel] = []
    start, sizes = Unit.start_all_gather, [0]

    def nbytes(tensors: Iterable[Tensor]) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def gather(unit: Unit) -> None:
        start(unit)
        sizes.append(nbytes(frozen.param_buffer for model in models for frozen in model.frozen_units))

    with mock.patch.object(Unit, "start_all_gather", gather):
        train(flags, base=shape, before=lambda run: models.extend(run.model))
    (model,) = models
    shards = [unit.weight_shard for unit in model.frozen_units]
    packed = [function.stored.packed for function in _in_nf4(model)] if not shards else []
    return nbytes([p for p in model.parameters() if not p.requires_grad] + shards + packed), max(sizes)


def _in_nf4(model: nn.Module) -> list[Nf4Linear]:
    functions = [getattr(getattr(layer, "linear", None), "function", None) for layer in model.modules()]
    return [function for function in functions if isinstance(function, Nf4Linear)]


def test_zero_3_shards_frozen_weights(wide: Path) -> None:
    """A rank keeps its half. One layer is whole at a time; with overlap, the next one too."""
    shape = WIDE.replace("--fp64", "--bf16")
    zero_3 = f"{FSDP} optim_grads_params"
    layouts = {"ZeRO-2": f"{FSDP} optim_grads", "ZeRO-3": zero_3, "ahead": f"{zero_3} --overlap-param-gather"}
    kinds = {"bf16": LORA, "nf4": NF4}
    cells = [f"{flags_of(wide, kind, 2)} {layout}" for kind in kinds.values() for layout in layouts.values()]
    for found in run_on_ranks(bytes_of_frozen_weights, 2, cells, shape):
        held = dict(zip([(kind, name) for kind in kinds for name in layouts], found, strict=True))
        for kind in kinds:
            whole = held[kind, "ZeRO-2"][0]
            assert held[kind, "ZeRO-2"][1] == 0
            assert held[kind, "ZeRO-3"][0] == held[kind, "ahead"][0] == pytest.approx(whole / 2, rel=0.02)
            layer = held[kind, "ZeRO-3"][1]
            assert whole / 5 < layer < whole / 3.5  # four layers, and small tables
            assert held[kind, "ahead"][1] == pytest.approx(2 * layer, rel=0.02)
        assert held["nf4", "ZeRO-3"][0] < 0.4 * held["bf16", "ZeRO-3"][0]


def test_frozen_weights_in_a_file(base: Path, tmp_path: Path) -> None:
    zero_3 = f"{flags_of(base, LORA, 2)} {FSDP} optim_grads_params"
    runs = [zero_3, f"{zero_3} --param-nvme-offload-path {tmp_path}"]
    in_memory, in_file = zip(*train_all_on_ranks(runs, 2, base=SHAPE), strict=True)
    assert in_file[0].losses == in_memory[0].losses and len(in_file[0].losses) == 2
    assert differences(in_file[0].at_end, in_memory[0].at_end) == []


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def saving(base: Path, root: Path, iterations: int, layout: str = "", kind: str = KINDS["DoRA"]) -> str:
    return f"{flags_of(base, kind, iterations)} --lr-decay-iters 4 --load {root} --save {root} {layout}"


@pytest.mark.slow
def test_checkpoints_hold_adapters_and_any_layout_continues_them(base: Path, tmp_path: Path) -> None:
    whole = train(f"{flags_of(base, KINDS['DoRA'], 4)} --lr-decay-iters 4", base=SHAPE)
    train(saving(base, tmp_path / "run", 2), base=SHAPE)
    catalogue = open_checkpoint(tmp_path / "run/iter_0000002").catalogue
    assert catalogue and all(".adapters." in name for name in catalogue)
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)  # the folder may have another name, if its content is the same
    ranks = train_on_ranks(saving(moved, tmp_path / "run", 4, TP2 + " --sequence-parallel"), 2, base=SHAPE)
    end, expected = state_at_end(ranks), state_at_end([whole])
    assert end.keys() == expected.keys()
    assert max(float((end[name] - expected[name]).abs().max()) for name in end) < 1e-9


def test_adapters_of_other_weights_are_refused(base: Path, tmp_path: Path) -> None:
    train(saving(base, tmp_path / "run", 1), base=SHAPE)
    other = tmp_path / "other"
    train(f"--mock-data --train-iters 1 --seed 7 --save {other}", base=SHAPE)
    with pytest.raises(UserError, match=r"--pretrained-checkpoint .*other holds other weights than those that the ad"):
        train(saving(other, tmp_path / "run", 2), base=SHAPE)
    with pytest.raises(UserError, match=r"--lora-rank is not set in this run and 4 in the checkpoint|adapters alone"):
        train(f"--mock-data --train-iters 2 --load {tmp_path / 'run'}", base=SHAPE)
    with pytest.raises(UserError, match="contains adapters alone; give the model that they adapt"):
        train(flags_of(tmp_path / "run", KINDS["DoRA"]), base=SHAPE)
    with pytest.raises(UserError, match=r"--lora-rank is 2 in this run and 4 in the checkpoint"):
        train(saving(base, tmp_path / "run", 2, kind="--lora-rank 2 --use-dora"), base=SHAPE)


@pytest.mark.slow
def test_a_base_that_trained_on_is_read_at_its_old_iteration(tmp_path: Path) -> None:
    root = tmp_path / "base"
    run = f"--mock-data --save {root} --load {root} --save-interval 1 --lr-decay-iters 3"
    train(f"{run} --train-iters 1", base=SHAPE)
    adapters = f"--mock-data --pretrained-checkpoint {root} {LORA} --save {tmp_path / 'a'} --load {tmp_path / 'a'}"
    train(f"{adapters} --train-iters 1 --lr-decay-iters 3", base=SHAPE)
    train(f"{run} --train-iters 2", base=SHAPE)
    going = train(f"{adapters} --train-iters 2 --lr-decay-iters 3", base=SHAPE)
    assert len(going.steps) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--lora-rank 4", "give --pretrained-checkpoint, the folder of its checkpoints, or --load-hf"),
        ("--lora-rank 0 --load-hf .", "--lora-rank 0 must be at least 1"),
        ("--lora-rank 4 --lora-dropout 1 --load-hf .", "--lora-dropout 1.0 must be at least 0 and less than 1"),
        ("--lora-rank 4 --lora-alpha 0 --load-hf .", "--lora-alpha 0.0 must be larger than 0"),
        ("--lora-rank 4 --load-hf . --bf16 --fp8-format e4m3", "--lora-rank does not go with --fp8-format e4m3: produ"),
        ("--lora-rank 4 --load-hf . --optimizer muon", "--lora-rank does not go with --optimizer muon"),
        ("--lora-rank 4 --load-hf . --qk-clip", "--lora-rank does not go with --qk-clip: it scales weights"),
    ],
)
def test_flags_that_do_not_go_together(flags: str, problem: str) -> None:
    assert any(problem in found for found in problems_of(flags)), problems_of(flags)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (
            "--lora-rank 4 --lora-target-modules linear_qkv query",
            "no linear layer query; it has linear_fc1, ",
        ),
        ("--lora-rank 33", "--lora-rank 33: decoder.layers.0.self_attention.linear_(qkv|proj) has 32 rows or columns"),
        ("--lora-rank 4 --lora-target-modules linear_qkv q_proj", "linear_qkv already includes q_proj; give one"),
    ],
)
def test_adapters_that_the_model_cannot_have(base: Path, kind: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        train(flags_of(base, kind), base=SHAPE)


def test_adapters_of_experts_with_options_that_they_lack(base_of_experts: Path) -> None:
    with pytest.raises(UserError, match="--use-dora does not go with adapters of experts"):
        train(flags_of(base_of_experts, f"{LORA} --use-dora"), base=EXPERTS)


# ---------------------------------------------------------------------------------------------------------------------
# 4-bit weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NF4, f"{NF4} --use-dora --lora-target-modules q_proj linear_proj linear_fc1"])
def test_layouts_with_nf4(wide: Path, kind: str) -> None:
    layouts = [LAYOUTS[name] for name in ("TP with SP, recomputed", "PP, parts recomputed")]
    layouts += [LAYOUTS[name] for name in ("ZeRO-3, recomputed", "ZeRO-3, ahead")]
    alone = train(flags_of(wide, kind), base=WIDE)
    by_rank = train_all_on_ranks([f"{flags_of(wide, kind)} {layout}" for layout in layouts], 2, base=WIDE)
    for number, _ in enumerate(layouts):
        check_same_run([outcomes[number] for outcomes in by_rank], alone)
    plain = train(flags_of(wide, kind.replace("nf4", "model")), base=WIDE)
    assert alone.losses[0] != plain.losses[0] and alone.losses[0] == pytest.approx(plain.losses[0], rel=0.02)
    assert not [name for name in state_at_end([alone]) if name.endswith("linear_proj.weight")]


def test_nf4_needs_whole_blocks(base: Path) -> None:
    with pytest.raises(UserError, match="linear_qkv has 32 inputs on a rank, which must be a multiple of 64"):
        train(flags_of(base, NF4), base=SHAPE)
