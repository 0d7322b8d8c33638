"""--fp8-param-gather: equal results to the bit, with fewer bytes in memory and on the wire."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support import fake_transformer_engine as fake
from support.processes import run_on_ranks
from support.runs import Outcome, differences, logger_of, state_at_end, state_at_start, train

from megatron.core import backends
from megatron.core.communication.traffic import recorded
from megatron.core.distributed.fp8_unit import Fp8Unit
from megatron.core.ops.transformer_engine import engine
from megatron.training.trainer import Trainer

STEPS = 3
FLAGS = "--mock-data --eval-interval 2 --eval-iters 1 --hidden-size 32 --ffn-hidden-size 64 --fp8-format hybrid --bf16"
TENSORWISE = f"{FLAGS} --fp8-recipe tensorwise"
DELAYED = f"{FLAGS} --fp8-amax-history-len 3 --fp8-amax-compute-algo max"
BLOCKWISE = f"{FLAGS} --fp8-recipe blockwise"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48"
GROUPED = f"{EXPERTS} --moe-grouped-gemm"
SHARDED = "--use-distributed-optimizer"
ZERO3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
GATHER = "--fp8-param-gather"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"


@dataclass
class Measured:
    """A run on one rank, and what its weights cost."""

    outcome: Outcome
    fp8_elements: int = 0
    """Elements of the units whose weights are gathered in fp8."""
    weight_bytes: int = 0
    """Bytes of all weights between steps."""
    gathered: dict[str, int] = field(default_factory=dict)
    """Bytes of all-gathers, by type."""


def measured(flags: Sequence[str]) -> list[Measured]:
    """Trains several runs on this rank."""
    found = []
    for each in flags:
        seen: list[Trainer] = []
        with recorded() as log:
            run = Measured(train(each, before=seen.append))
        units = [unit for chunk in seen[0].model for unit in chunk.units]
        sizes = {unit.plan.numel for unit in units if isinstance(unit, Fp8Unit)}
        run.fp8_elements = sum(unit.plan.numel for unit in units if isinstance(unit, Fp8Unit))
        run.weight_bytes = sum(unit.weight_bytes for unit in units)
        for entry in log:
            if entry.operation == "all_gather" and (entry.dtype is not torch.uint8 or entry.nbytes in sizes):
                kind = str(entry.dtype).removeprefix("torch.")
                run.gathered[kind] = run.gathered.get(kind, 0) + entry.nbytes
        found.append(run)
    return found


def with_and_without(flags: str, ranks: int) -> tuple[list[Measured], list[Measured]]:
    """Returns the runs of all ranks without the flag, and those with it, after checking that they computed the same."""
    each = [f"{flags} --train-iters {STEPS}", f"{flags} --train-iters {STEPS} {GATHER}"]
    by_rank = [measured(each)] if ranks == 1 else run_on_ranks(measured, ranks, each)
    without, with_flag = ([runs[number] for runs in by_rank] for number in range(2))
    ours, exact = ([run.outcome for run in runs] for runs in (with_flag, without))
    assert all(run.fp8_elements > 0 for run in with_flag) and not any(run.fp8_elements for run in without)
    assert logger_of(ours).losses == logger_of(exact).losses and len(logger_of(ours).losses) == STEPS
    norms = [[step.grad_norm for step in logger_of(runs).steps] for runs in (ours, exact)]
    assert norms[0] == norms[1] and norms[0][0] is not None
    assert [v.losses for v in logger_of(ours).validations] == [v.losses for v in logger_of(exact).validations]
    assert differences(state_at_end(ours), state_at_end(exact)) == []
    return without, with_flag


RECIPES = [TENSORWISE, DELAYED, BLOCKWISE]
MODELS = [GROUPED, "--swiglu --disable-bias-linear", EXPERTS]


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        # Each recipe and each model once; the other combinations are slow.
        pytest.param(recipe, model, marks=[pytest.mark.slow] * (number != other))
        for number, recipe in enumerate(RECIPES)
        for other, model in enumerate(MODELS)
    ],
)
def test_results_are_equal_to_the_bit(recipe: str, model: str) -> None:
    without, with_flag = with_and_without(f"{recipe} {model} {SHARDED}", 2)
    for before, after in zip(without, with_flag, strict=True):
        # 2 bytes in bfloat16 become 1 byte in fp8; the shard in bfloat16 follows from the main weights.
        assert after.weight_bytes == before.weight_bytes - after.fp8_elements
        gathers = STEPS * after.fp8_elements  # in bytes, of the updates; the first step gathers once more
        assert after.gathered["uint8"] == gathers + after.fp8_elements
        assert before.gathered["bfloat16"] - after.gathered["bfloat16"] == 2 * gathers


LAYOUTS = {
    "one rank": (1, TENSORWISE),
    "replicas": (2, DELAYED),
    "ZeRO 2": (2, f"{TENSORWISE} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"),
    "ZeRO 3 of experts": (2, f"{DELAYED} {GROUPED} {ZERO3} {OVERLAP}"),
    "no cache": (2, f"{TENSORWISE} {SHARDED} --no-fp8-weight-cache"),
    "remainders": (2, f"{TENSORWISE} {SHARDED} --use-precision-aware-optimizer"),
    "narrow state": (
        2,
        f"{TENSORWISE} {SHARDED} --use-precision-aware-optimizer --main-params-dtype fp16 --exp-avg-dtype fp8",
    ),
    "offload": (2, f"{TENSORWISE} {SHARDED} --optimizer-cpu-offload --optimizer-offload-fraction 0.5"),
    "muon": (2, f"{TENSORWISE} {SHARDED} --optimizer muon"),
    "clipped logits": (2, f"{TENSORWISE} {SHARDED} --qk-clip --qk-clip-threshold 0.001 --log-params-norm"),
    "float32": (2, f"{TENSORWISE.replace('--bf16', '')} {SHARDED}"),
    "float16": (2, f"{TENSORWISE.replace('--bf16', '--fp16 --initial-loss-scale 4096')} {SHARDED}"),
    "meta device": (2, f"{TENSORWISE} {ZERO3} --init-model-with-meta-device"),
    "tensor": (4, f"{TENSORWISE} {SHARDED} {OVERLAP} --tensor-model-parallel-size 2 --sequence-parallel"),
    "experts": (4, f"{TENSORWISE} {GROUPED} {SHARDED} --expert-model-parallel-size 2"),
    "stages": (4, f"{DELAYED} {SHARDED} {OVERLAP} --pipeline-model-parallel-size 2"),
    "instances": (4, f"{TENSORWISE} {SHARDED} --num-distributed-optimizer-instances 2"),
}


SLOW = ("replicas", "ZeRO 2", "no cache", "narrow state", "float32", "meta device", "instances")
"""What others show too: replicas of units are those of `stages`, shards those of ZeRO 3 and of the sharded optimizer;
`float16` has another type of weights, and `remainders` the optimizer that `narrow state` has."""


@pytest.mark.fast("one rank", "ZeRO 3 of experts")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS])
def test_results_are_equal_under_every_layout_and_optimizer(name: str) -> None:
    with_and_without(LAYOUTS[name][1], LAYOUTS[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("flags", [pytest.param(TENSORWISE, marks=pytest.mark.slow), f"{DELAYED} {GROUPED}"])
def test_a_run_resumes_with_and_without_the_flag(flags: str, tmp_path: Path) -> None:
    def runs(steps: int, more: str = "", saves: str = "", loads: str = "") -> str:
        saving = f"--save {tmp_path / saves} --save-interval 2" if saves else ""
        loading = f"--load {tmp_path / loads} --ckpt-step 2" if loads else ""
        return f"{flags} {SHARDED} --train-iters {steps} {more} {saving} {loading}"

    without, with_flag, to_with, to_without, kept = (
        [run.outcome for run in each]
        for each in zip(
            *run_on_ranks(
                measured,
                2,
                [
                    runs(4, saves="without"),
                    runs(4, GATHER, saves="with"),
                    runs(4, GATHER, loads="without"),
                    runs(4, loads="with"),
                    runs(4, GATHER, loads="with"),
                ],
            ),
            strict=True,
        )
    )
    expected = state_at_end(without)
    assert differences(state_at_end(with_flag), expected) == []
    for resumed in (to_with, to_without, kept):
        assert differences(state_at_end(resumed), expected) == []
        assert logger_of(resumed).losses == logger_of(without).losses[2:]
    alone = train(f"{flags} --train-iters 2 {GATHER} --load {tmp_path / 'with'} --ckpt-step 2 --finetune")
    assert differences(weights(state_at_start([alone])), weights(state_at_start(to_without))) == []


def weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if name.startswith("weight ") and "history" not in name}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (FLAGS.replace("--fp8-format hybrid", ""), "--fp8-param-gather: has no effect without --fp8-format"),
    ],
)
def test_a_flag_without_effect_is_said(flags: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with_flag, without = measured([f"{flags} {GATHER} --train-iters 2", f"{flags} --train-iters 2"])
    assert sentence in capsys.readouterr().out
    assert with_flag.fp8_elements == 0 and with_flag.outcome.losses == without.outcome.losses


def test_what_takes_part_of_the_effect_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = measured([f"{TENSORWISE} {GATHER} --use-precision-aware-optimizer --train-iters 1"])
    said = "--fp8-param-gather: with --use-precision-aware-optimizer a rank also keeps its shard of these weights"
    assert said in capsys.readouterr().out and run.weight_bytes > 3 * run.fp8_elements
    for module in (backends, engine):
        monkeypatch.setattr(module, "find_engine", lambda: fake.FAKE)
    (run,) = measured(
        [f"{DELAYED.replace('--bf16', '--fp64')} {GATHER} --transformer-impl transformer_engine --train-iters 1"]
    )
    said = "--fp8-param-gather: has no effect with --transformer-impl transformer_engine"
    assert said in capsys.readouterr().out and run.fp8_elements == 0
