"""The micro-batches of the last steps, kept within a limit."""

import pytest
import torch

from megatron.training.data import recent_steps
from megatron.training.data.batch import Batch
from megatron.training.data.recent_steps import LEAST_STEPS, MOST_STEPS, RecentSteps, fields_of
from megatron.training.data.step_data import StepData
from megatron.training.state import TrainState


def batch(number: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.full((4,), number), "sample_ids": torch.tensor([number])}


def test_steps_are_found_by_number_and_draws_are_kept() -> None:
    data = StepData(iter(map(batch, range(20))), micro_batch_size=1)
    data.keep_recent_steps()
    assert data.recent is not None
    next(data)  # before the first step: not kept
    state = TrainState(iteration=6, consumed_train_samples=12)
    for _ in range(2):
        data.begin(state.iteration)
        data.recent.begin(state)
        next(data), next(data)
        state.iteration += 1  # the step keeps a copy of its own
    step = data.recent.find(8)
    assert step is not None and step.before == TrainState(iteration=7, consumed_train_samples=12)
    assert [int(each["tokens"][0]) for each in step.batches] == [3, 4]
    assert data.recent.find(6) is None and data.recent.find(9) is None


def test_a_micro_batch_that_is_drawn_again_is_kept_once() -> None:
    data = StepData(iter(map(batch, range(4))), micro_batch_size=1)
    data.keep_recent_steps()
    data.keep_step()
    assert data.recent is not None
    data.begin(0)
    data.recent.begin(TrainState())
    next(data)
    assert data.rewind()
    next(data), next(data)
    assert [int(each["tokens"][0]) for each in data.recent.steps[0].batches] == [0, 1]


@pytest.mark.parametrize(("most_bytes", "kept"), [(0, LEAST_STEPS), (1 << 20, 9)])
def test_old_steps_are_dropped_when_they_take_too_much(monkeypatch, most_bytes: int, kept: int) -> None:
    monkeypatch.setattr(recent_steps, "MOST_BYTES", most_bytes)
    recent = RecentSteps()
    for iteration in range(9):
        recent.begin(TrainState(iteration=iteration))
        recent.add(batch(iteration))
    assert [step.iteration for step in recent.steps] == list(range(10 - kept, 10))


def test_small_steps_do_not_pile_up() -> None:
    """Thousands of small steps took ever more memory, and time to count it."""
    recent = RecentSteps()
    for iteration in range(3 * MOST_STEPS):
        recent.begin(TrainState(iteration=iteration))
        recent.add(batch(iteration))
    assert [step.iteration for step in recent.steps] == list(range(2 * MOST_STEPS + 1, 3 * MOST_STEPS + 1))
    assert recent._nbytes == sum(step.nbytes for step in recent.steps) == MOST_STEPS * (4 * 8 + 8)


def test_tensors_of_batches() -> None:
    ones = torch.ones(1, 2)
    assert list(fields_of(Batch(ones, ones, ones, ones))) == ["tokens", "labels", "loss_mask", "position_ids"]
    assert list(fields_of({"a": ones, "b": 3})) == ["a"] and fields_of([ones]) == {}
