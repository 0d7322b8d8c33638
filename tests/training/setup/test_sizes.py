"""Numbers of samples, and an automatic layout, follow from flags and the counts of a checkpoint."""

from pathlib import Path

import pytest
from support.runs import TINY, train, write_documents

from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.providers import SampleCounts
from megatron.training.setup.sizes import resolve_auto_layout, sample_counts
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


def test_an_automatic_layout_is_resolved_into_a_new_config() -> None:
    plain = config_of("--train-iters 9")
    assert resolve_auto_layout(plain, 41) == (plain, [])
    flags = "--train-iters 9 --num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout auto"
    config = config_of(flags, ranks=2)
    resolved, (note,) = resolve_auto_layout(config, 41)
    stages = resolved.transformer.pipeline_model_parallel_layout
    assert note == f"--pipeline-model-parallel-layout auto: stages {stages}" and stages != "auto"
    assert config.transformer.pipeline_model_parallel_layout == "auto"
