"""Batch sizes over a run."""

from types import SimpleNamespace

import pytest

from megatron.core.exceptions import UserError
from megatron.training.batch_schedule import BatchSchedule, BatchSteps, RampUp


def test_a_constant_batch() -> None:
    schedule = BatchSchedule(64, 4, 2)
    schedule.update(10**9)
    assert (schedule.num_microbatches, schedule.global_batch_size, schedule.samples_at_once) == (8, 64, 8)


def test_ramp_up_follows_megatron_lms_formula() -> None:
    schedule = BatchSchedule(32, 2, 2, RampUp(8, 8, 300))
    for consumed, size in ((0, 8), (99, 8), (100, 16), (199, 16), (200, 24), (299, 24), (300, 32), (301, 32)):
        schedule.update(consumed)
        assert (schedule.global_batch_size, schedule.num_microbatches) == (size, size // 4), consumed
    assert schedule.final_num_microbatches == 8


def test_a_batch_that_does_not_divide_is_refused_or_rounded_down() -> None:
    with pytest.raises(
        UserError, match=r"--global-batch-size 30 is no multiple of .* 4 x 2 .* = 8; 24 or 32 would work"
    ):
        BatchSchedule(30, 4, 2)
    with pytest.raises(UserError, match=r"--global-batch-size 6 .* 8 would work"):
        BatchSchedule(6, 4, 2)
    schedule = BatchSchedule(30, 4, 2, decrease_if_needed=True)
    assert (schedule.scheduled_global_batch_size, schedule.global_batch_size, schedule.num_microbatches) == (30, 24, 3)
    with pytest.raises(UserError, match="8 would work"):
        BatchSchedule(6, 4, 2, decrease_if_needed=True)


def test_a_stage_of_the_ramp_that_does_not_divide_is_refused_when_it_comes() -> None:
    schedule = BatchSchedule(24, 4, 2, RampUp(8, 4, 400))
    schedule.update(50)
    with pytest.raises(UserError, match=r"--global-batch-size 12"):
        schedule.update(100)
    rounded = BatchSchedule(24, 4, 2, RampUp(8, 4, 400), decrease_if_needed=True)
    rounded.update(100)
    assert (rounded.scheduled_global_batch_size, rounded.global_batch_size) == (12, 8)


@pytest.mark.parametrize(
    ("rampup", "says"),
    [(RampUp(40, 8, 100), "start at most --global-batch-size 32"), (RampUp(8, 7, 100), "29 would work")],
)
def test_impossible_ramps(rampup: RampUp, says: str) -> None:
    with pytest.raises(UserError, match=says):
        BatchSchedule(32, 2, 2, rampup)


def test_from_config_fills_in_the_default() -> None:
    config = SimpleNamespace(
        global_batch_size=None,
        micro_batch_size=3,
        rampup_batch_size=None,
        step_batch_size_schedule=None,
        decrease_batch_size_if_needed=False,
    )
    assert BatchSchedule.from_config(config, 5, seq_length=4).global_batch_size == 15
    config.step_batch_size_schedule = "0:15 8:30"
    schedule = BatchSchedule.from_config(config, 5, seq_length=4)
    schedule.update(2)
    assert schedule.global_batch_size == 30


def test_batch_sizes_change_at_numbers_of_tokens() -> None:
    steps = BatchSteps.parse("0:8 1.5K:16 2K:32", seq_length=100)
    assert steps.steps == ((0, 8), (15, 16), (20, 32))
    schedule = BatchSchedule(32, 2, 2, steps)
    sizes = []
    for consumed in (0, 14, 15, 19, 20, 10**9):
        schedule.update(consumed)
        sizes.append((schedule.global_batch_size, schedule.num_microbatches))
    assert sizes == [(8, 2), (8, 2), (16, 4), (16, 4), (32, 8), (32, 8)]
    assert BatchSteps.parse("0:1 2T:3", 1).steps[1][0] == 2 * 10**12
    for text, says in {
        "": "must begin at 0",
        "1:8": "must begin at 0",
        "0:0": "at least 1",
        "0:8 10:16 5:32": "must grow",
        "0:8 1G:9": "1G:9: expected TOKENS:SIZE",
    }.items():
        with pytest.raises(UserError, match=says):
            BatchSteps.parse(text, 1)


@pytest.mark.parametrize("growth", [None, RampUp(8, 8, 300), BatchSteps(((0, 8), (100, 16), (117, 32)))])
def test_samples_of_the_first_steps_are_those_that_the_steps_consume(growth: RampUp | BatchSteps | None) -> None:
    schedule = BatchSchedule(32, 2, 2, growth)
    consumed = 0
    for iterations in range(40):
        assert BatchSchedule(32, 2, 2, growth).samples_of(iterations) == consumed
        schedule.update(consumed)
        consumed += schedule.global_batch_size


def test_samples_of_a_batch_that_is_rounded_down() -> None:
    assert BatchSchedule(24, 4, 5, None, decrease_if_needed=True).samples_of(3) == 60


@pytest.mark.parametrize("growth", [None, RampUp(2, 2, 40), BatchSteps(((0, 2), (10, 4), (30, 8)))])
def test_samples_of_the_steps_after_others(growth: RampUp | BatchSteps | None) -> None:
    schedule = BatchSchedule(8, 1, 1, growth)
    for first in range(0, 25, 3):
        assert schedule.samples_of(7, schedule.samples_of(first)) == schedule.samples_of(first + 7)
    assert schedule.samples_of(3, 1000) == 1024


@pytest.mark.parametrize("decrease", [False, True])
@pytest.mark.parametrize(
    ("final", "growth"),
    [
        (10, None),
        (16, RampUp(4, 4, 100)),
        (64, RampUp(8, 8, 777)),
        (12, RampUp(4, 4, 16)),
        (32, BatchSteps.parse("0:8 100:16 200:32", 1)),
        (32, BatchSteps.parse("0:8 100:16 5K:32", 1)),
    ],
)
def test_iterations_of_samples_are_those_of_step_after_step(
    final: int, growth: RampUp | BatchSteps | None, decrease: bool
) -> None:
    for samples in (0, 3, 20, 22, 23, 24, 90, 1000, 1003, 6000):
        schedule = BatchSchedule(final, 1, 3 if decrease else 1, growth, decrease)
        iterations, starts = 0, [0]
        while starts[-1] + schedule.global_batch_size <= samples:
            starts.append(starts[-1] + schedule.global_batch_size)
            iterations += 1
            schedule.update(starts[-1])
        assert schedule.samples_of(iterations) == starts[-1]
        for done, consumed in enumerate(starts):
            assert schedule.iterations_of(samples, consumed) == iterations - done, (samples, consumed)
        assert schedule.iterations_of(samples, samples + 7) == 0
