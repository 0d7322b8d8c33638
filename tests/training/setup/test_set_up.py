"""What set-up derives from the flags, without building a run."""

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.runs import TINY, train, write_documents
from torch import nn

from megatron.core.exceptions import UserError
from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.providers import SampleCounts
from megatron.training.setup.set_up import build_probe, resolve_auto_layout, sample_counts, set_torch
from megatron.training.state import TrainState


def config_of(flags: str, ranks: int = 1) -> PretrainConfig:
    words = f"{TINY} --eval-iters 1 --mock-data {flags}".split()
    return configure(words, launch_environment=LaunchEnvironment(ranks, False))


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        ("--train-iters 10", (40, 4, 4)),  # one evaluation, at the end
        ("--train-iters 10 --eval-interval 4", (40, 4, 4)),
        ("--train-iters 10 --eval-interval 4 --rampup-batch-size 2 1 20", (40 - 14, 4, 4)),
        ("--train-iters 10 --eval-interval 4 --eval-fresh-samples", (40, 12, 4)),  # after 4, 8 and 10
        ("--train-iters 10 --eval-interval 4 --eval-iters 3", (40, 12, 12)),
        ("--train-iters 10 --eval-interval 4 --eval-iters 3 --eval-fresh-samples", (40, 36, 12)),
        ("--train-samples 40", (40, 4, 4)),
        ("--train-iters 10 --eval-interval 4 --skip-train", (40, 4, 4)),
    ],
)
def test_samples_that_a_run_needs(flags: str, counts: tuple[int, int, int]) -> None:
    assert sample_counts(config_of(flags)) == SampleCounts(*counts)


@pytest.mark.parametrize(
    ("flags", "valid"),
    [
        ("--train-iters 10 --eval-interval 1", 44),  # the flags of the checkpoint
        ("--train-iters 10 --eval-interval 4", 32),  # 24 are taken; left are those after 8 and at the end
        ("--train-iters 10 --eval-interval 2", 36),  # left are those after 8 and 10, and the one at the end
        ("--train-iters 10", 28),
        ("--train-iters 10 --eval-interval 4 --skip-train", 28),
        ("--train-iters 2 --eval-interval 1", 28),  # the checkpoint has more iterations than the run
    ],
)
def test_a_resumed_run_needs_validation_samples_after_those_that_are_taken(flags: str, valid: int) -> None:
    """The checkpoint of a run with an evaluation of 4 samples after each of 6 iterations."""
    state = TrainState(iteration=6, consumed_valid_samples=24)
    assert sample_counts(config_of(flags), state).valid == 4
    assert sample_counts(config_of(f"{flags} --eval-fresh-samples"), state).valid == valid


@pytest.mark.parametrize(
    ("flags", "train"),
    [
        ("--train-iters 10 --global-batch-size 8", 80),  # the flags of the checkpoint
        ("--train-iters 10", 64),  # 48 are taken; left are 4 steps of 4
        ("--train-iters 10 --global-batch-size 16", 160),
        ("--train-iters 10 --global-batch-size 6 --rampup-batch-size 2 2 60", 48 + 4 + 4 + 4 + 6),
        ("--train-iters 2 --global-batch-size 4", 48),  # the checkpoint has more iterations than the run
    ],
)
def test_a_resumed_run_needs_training_samples_after_those_that_are_taken(flags: str, train: int) -> None:
    """The checkpoint of a run with a global batch size of 8, after 6 iterations."""
    state = TrainState(iteration=6, consumed_train_samples=48)
    assert sample_counts(config_of(flags), state).train == train


def test_a_blend_lasts_for_a_run_that_goes_on_with_smaller_batches(tmp_path: Path) -> None:
    first, second = (write_documents(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    flags = f"--train-iters 8 --eval-iters 0 --data-path 1 {first} 2 {second} --split 1"
    train(f"{flags} --global-batch-size 8 --exit-interval 6 --save {tmp_path / 'run'}")
    resumed = f"{flags} --global-batch-size 2 --load {tmp_path / 'run'} --override-opt-param-scheduler"
    assert len(train(resumed).steps) == 2


def test_a_blend_of_validation_data_lasts_for_a_run_with_fewer_evaluations(tmp_path: Path) -> None:
    """A weighted blend has only the samples that are asked for. The first run has taken more than the others need."""
    first, second = (write_documents(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    flags = f"--train-iters 8 --eval-iters 1 --data-path 1 {first} 2 {second} --split 80,10,10 --eval-fresh-samples"
    train(f"{flags} --eval-interval 1 --exit-interval 6 --save {tmp_path / 'run'}")
    resumed = f"{flags} --load {tmp_path / 'run'}"
    assert len(train(f"{resumed} --eval-interval 8").validations) == 2  # of both sets, once
    assert len(train(f"{resumed} --eval-interval 8 --skip-train").validations) == 2


def test_global_options_of_torch_and_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # kept, since it is set already
    before = logging.getLogger().level
    try:
        flags = "--deterministic-mode --logging-level 35 --disable-bf16-reduced-precision-matmul"
        set_torch(config_of(f"--train-iters 9 {flags}"))
        assert torch.are_deterministic_algorithms_enabled() and logging.getLogger().level == 35
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        set_torch(config_of("--train-iters 9"))
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    finally:
        logging.getLogger().setLevel(before)


def test_no_probe_without_an_embedding_or_without_the_check() -> None:
    assert build_probe(config_of("--train-iters 9"), [nn.Linear(2, 2)]) is None
    assert build_probe(config_of("--train-iters 9 --no-check-for-nan-in-loss-and-grad"), [nn.Linear(2, 2)]) is None


def test_an_automatic_layout_is_resolved_into_a_new_config() -> None:
    plain = config_of("--train-iters 9")
    assert resolve_auto_layout(plain, 41) == (plain, [])
    flags = "--train-iters 9 --num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout auto"
    config = config_of(flags, ranks=2)
    resolved, (note,) = resolve_auto_layout(config, 41)
    stages = resolved.transformer.pipeline_model_parallel_layout
    assert note == f"--pipeline-model-parallel-layout auto: stages {stages}" and stages != "auto"
    assert config.transformer.pipeline_model_parallel_layout == "auto"


@pytest.mark.parametrize("fp8", ["", "--bf16 --fp8-format hybrid --fp8-recipe delayed"])
def test_an_injected_error_is_found_and_changes_nothing(fp8: str, capfd: pytest.CaptureFixture[str]) -> None:
    flags = f"--mock-data --train-iters 2 --eval-iters 0 {fp8}"
    plain = train(flags).losses
    assert train(f"{flags} --error-injection-rate 3").losses == plain
    assert "lm loss is rejected, injected as transient_error" in capfd.readouterr().out
    with pytest.raises(RuntimeError, match=r"injected as persistent_error .* computed again: the same again"):
        train(f"{flags} --error-injection-rate 1 --error-injection-type persistent_error")


def test_a_full_disk_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that has nothing left to train, or only evaluates, saves nothing, so it needs no room."""
    flags = f"--mock-data --train-iters 1 --eval-iters 0 --save {tmp_path}"
    warning = f"WARNING: --save {tmp_path}: a checkpoint takes "
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10_000_000, used=9_999_000))
    train(flags)  # the patched report is wrong
    assert warning in capsys.readouterr().out
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1000, used=0))
    with pytest.raises(UserError, match=r"--save .*: a checkpoint takes .* MB, and the whole file system there has"):
        train(flags)
    train(f"{flags} --load {tmp_path}")
    train(f"{flags} --eval-iters 1 --skip-train")
    assert warning not in capsys.readouterr().out
