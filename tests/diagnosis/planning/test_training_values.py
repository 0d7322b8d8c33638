"""Batch size, learning rate, length and checkpoint interval of a plan, against published runs."""

import pytest

from megatron.diagnosis.planning.model_shape import shape_of
from megatron.diagnosis.planning.quantities import quantity
from megatron.diagnosis.planning.training_values import checkpoint_interval, training_values


def test_the_law_gives_the_values_of_deepseek_7b() -> None:
    """DeepSeek LLM 7B (arXiv:2401.02954, table 2): 2T tokens, 2,304 rows of 4,096 tokens, learning rate 4.2e-4."""
    shape = shape_of("Llama-style", quantity("6,900,000,000"), 102400, 4096)
    values = training_values(shape, 2 * 10**12, 4096, 64)
    assert 2304 / 1.35 < values.global_batch_size < 2304 * 1.35
    assert values.lr == pytest.approx(4.2e-4, rel=0.05) and values.min_lr == pytest.approx(values.lr / 10)
    assert values.warmup_iters == 2000
    assert 0 <= values.tokens(4096) - 2 * 10**12 < values.global_batch_size * 4096


def test_published_sizes_have_their_published_learning_rate() -> None:
    shape = shape_of("Llama 3.1", quantity("405B"), None, 8192)
    values = training_values(shape, 15_600_000_000_000, 8192, 16384)
    assert values.lr == 8e-5 and values.lr_reason == "published: llama3.1-405b"


@pytest.mark.parametrize("gpus", [1, 2, 6, 8, 24, 64, 96, 512, 1000, 16384])
def test_many_data_parallel_sizes_divide_the_batch(gpus: int) -> None:
    shape = shape_of("Llama-style", quantity("7B"), 32000, 4096)
    size = training_values(shape, 10**12, 4096, gpus).global_batch_size
    assert size % gpus == 0 or gpus % size == 0 or (gpus & (gpus - 1)) == 0


def test_small_runs_have_several_steps_and_no_wild_learning_rate() -> None:
    shape = shape_of("Llama-style", quantity("1M"), 600, 64)
    values = training_values(shape, 8000, 64, 1)
    assert values.train_iters >= 20 and values.lr < 3e-3


def test_own_batch_size() -> None:
    shape = shape_of("Llama-style", quantity("7B"), 32000, 4096)
    values = training_values(shape, 10**9, 4096, 8, global_batch_size=96)
    assert (values.global_batch_size, values.batch_reason, values.train_iters) == (96, "--global-batch-size", 2544)


def test_checkpoints_come_as_often_as_failures_ask_for() -> None:
    often, reason = checkpoint_interval(20.0, 16384, 5e12)
    rarely, _ = checkpoint_interval(1.0, 8, 1e11)
    assert 10 <= often < 100 and "Young" in reason and rarely == 1000
