"""A full GPU: one sentence says what is held and what to do. Exit codes and the end of other ranks stay."""

import dataclasses
import re
import time
from typing import Any

import pytest
import torch
from support import full_gpu
from support.launch import launch
from support.runs import GPT, TINY, train

from megatron.diagnosis import device_memory
from megatron.diagnosis.device_memory import lack_of_gpu_memory, ways_to_take_less
from megatron.diagnosis.dry_run.dry_run import dry_run
from megatron.diagnosis.dry_run.report import short_size
from megatron.training import pretrain
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.launch.environment import Environment
from megatron.training.providers import Context, ForwardStep, Providers, Stage

FLAGS = "--mock-data --train-iters 4 --eval-iters 0 --log-interval 1"
TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 780.88 MiB is "
    "free. Including non-PyTorch memory, this process has 78.41 GiB memory in use. Of the allocated memory 77.57 GiB "
    "is allocated by PyTorch, and 118.74 MiB is reserved by PyTorch but unallocated."
)
"""The text of torch 2.11."""


def configured(flags: str = "", ranks: int = 1) -> Any:
    return configure(f"{TINY} {FLAGS} {flags}".split(), launch_environment=LaunchEnvironment(ranks, False))


def state_of_dry_run(flags: str = "", ranks: int = 1) -> str:
    return short_size(dry_run(configured(flags, ranks), GPT).memory.total)


def full_in_step_two(context: Context) -> ForwardStep:
    forward_step = GPT.build_forward_step(context)

    def full(data: Any, model: Any) -> Any:
        if context.state.iteration == 1 and context.environment.rank == context.environment.world_size - 1:
            raise torch.OutOfMemoryError(TEXT)
        return forward_step(data, model)

    return full


def full_at_setup(context: Context, stage: Stage) -> Any:
    if torch.get_default_device().type != "meta":  # what the estimate builds takes no memory
        raise torch.OutOfMemoryError(TEXT)
    return GPT.build_model(context, stage)


FULL_IN_STEP = dataclasses.replace(GPT, build_forward_step=full_in_step_two)
FULL_AT_SETUP = dataclasses.replace(GPT, build_model=full_at_setup)


@pytest.mark.parametrize(
    ("providers", "where"), [(FULL_IN_STEP, "in training, after iteration 1"), (FULL_AT_SETUP, "")]
)
def test_one_sentence_in_place_of_torchs(
    providers: Providers, where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "_SECONDS", 120.0)  # for a slow machine
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(FLAGS, providers)
    said = str(caught.value)
    assert said.startswith("out of GPU memory: no room for 2.00 GiB; torch had allocated")
    if where:
        assert re.search(r"\(--dry-run\), and [\d.]+ MiB with activations; to take less: --", said), said
    assert f"; weights, gradients and optimizer state of this rank take {state_of_dry_run()} (--dry-run), a" in said
    assert (f"rank 0 of 1 failed {where}: {said}" in capsys.readouterr().err) == bool(where)
    assert any("full" in frame.name for frame in caught.traceback)  # where it was asked for


def full_in_step() -> None:
    pretrain(FULL_IN_STEP)


def full_in_setup() -> None:
    pretrain(FULL_AT_SETUP)


@pytest.mark.parametrize(
    ("main", "where"),
    [(full_in_step, "rank 1 of 2 failed in training, after iteration 1"), (full_in_setup, "of 2 failed in start")],
)
def test_the_other_ranks_end_as_after_any_error(tmp_path: Any, main: Any, where: str) -> None:
    """At the set-up all ranks fail; in the step the last one does, and the other one waits for it in a collective."""
    program = launch(f"{FLAGS} --pipeline-model-parallel-size 2", 2, tmp_path, main)
    assert program.exit_codes() == [1, 1]
    output = "".join(map(program.output, (0, 1)))
    assert f"{where}: OutOfMemoryError: out of GPU memory: no room for 2.00 GiB; torch had" in output
    assert "(--dry-run)" in output


def test_an_estimate_that_hangs_or_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(0, 1, torch.device("cpu"), groups=None)  # type: ignore[arg-type]
    monkeypatch.setattr(device_memory, "_SECONDS", 0.1)
    for build_model in (lambda context, stage: time.sleep(1.0), lambda context, stage: 1 / 0):
        providers = dataclasses.replace(GPT, build_model=build_model)  # type: ignore[arg-type,return-value]
        said = lack_of_gpu_memory("CUDA out of memory.", configured(), providers, environment)
        assert said.startswith("out of GPU memory; to take less: --recompute-granularity full")


def test_what_torch_held_on_a_gpu() -> None:
    environment = Environment(0, 1, torch.device("cpu"), groups=None)  # type: ignore[arg-type]
    said = lack_of_gpu_memory(TEXT, configured(), GPT, environment)
    assert "torch had allocated 77.57 GiB of 79.11 GiB, and kept 118.74 MiB in free pieces (if" in said
    assert "--recompute-granularity full" in said and "--loss-chunk-size" in said
    small = TEXT.replace("capacity of 79.11 GiB", "capacity of 100.00 KiB")  # less than the state
    said = lack_of_gpu_memory(small, configured("--bf16"), GPT, environment)
    assert "to take less: --use-precision-aware-optimizer, --optimizer-cpu-offload --opt" in said


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (full_gpu.CUBLAS, full_gpu.CUBLAS),
        (full_gpu.NCCL, "Cuda failure 2 'out of memory'"),
        (full_gpu.RUNTIME, "CUDA error: out of memory"),
    ],
)
def test_a_library_that_asks_for_memory_itself(text: str, line: str) -> None:
    def full(context: Context) -> ForwardStep:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError) as caught:
        train(FLAGS, dataclasses.replace(GPT, build_forward_step=full))
    said = str(caught.value)
    assert said.startswith(f"out of GPU memory outside torch: {line}; weights, gradients and")
    assert "; to take less: --recompute-granularity full" in said


def test_only_flags_that_the_run_does_not_use_are_named() -> None:
    assert ways_to_take_less(configured("--micro-batch-size 2", ranks=2))[:2] == [
        "--use-distributed-optimizer",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
    ]
    used = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --loss-chunk-size 8"
    used += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    used += " --optimizer-cpu-offload --optimizer-offload-fraction 0.5"
    assert ways_to_take_less(configured(used, ranks=2)) == [
        "--tensor-model-parallel-size above 1",
        "--pipeline-model-parallel-size above 1",
    ]
