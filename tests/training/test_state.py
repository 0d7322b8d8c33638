"""The counts of a run, saved to and restored from a checkpoint."""

import dataclasses

import pytest

from megatron.core.exceptions import UserError
from megatron.training.state import TrainState

STATE = TrainState(3, 96, 4, 8, 1536, 2.5e9)


def test_json_and_back() -> None:
    assert STATE.to_json() == dataclasses.asdict(STATE)
    assert TrainState.from_json(STATE.to_json()) == STATE


def test_counts_that_an_older_release_did_not_save_start_at_zero() -> None:
    assert TrainState.from_json({"iteration": 7}) == TrainState(iteration=7)


def test_an_unknown_count_is_named() -> None:
    with pytest.raises(UserError, match="holds epoch, shard, which this release does not know"):
        TrainState.from_json({"iteration": 7, "shard": 1, "epoch": 2})


def test_steps_are_counted_and_skipped_ones_twice() -> None:
    state = TrainState()
    state.add_step(8, tokens=256, operations=1.5e9)
    assert state == TrainState(1, 8, 0, 0, 256, 1.5e9)
    state.add_skipped_step(4)
    assert state == TrainState(2, 12, 4, 0, 256, 1.5e9)


def test_restore_changes_the_object_that_others_hold() -> None:
    state = held = TrainState()
    state.restore(STATE)
    assert held == STATE and held is not STATE
