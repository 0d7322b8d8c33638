"""Which losses are spikes, and what a checkpoint keeps of it."""

import json
import math

import pytest
import torch

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.training.config.resilience import ResilienceConfig
from megatron.training.loss_spikes import LossSpikes

USUAL = [2.0, 2.1, 1.9, 2.0]


def spikes(action: str = "skip", limit: int = 10) -> LossSpikes:
    flags = ResilienceConfig(loss_spike_action=action, loss_spike_history=4, loss_spike_limit=limit)  # type: ignore[arg-type]
    return LossSpikes(flags, ProcessGroupCollection.from_grid(RankGrid(1), 0), torch.device("cpu"))


def judge(found: LossSpikes, *losses: float, first: int = 1) -> list[bool]:
    """Whether each of these losses is a spike. A step has two micro-batches of [sum, count]."""
    verdicts = []
    for number, loss in enumerate(losses, first):
        reports = [{"lm loss": torch.tensor([loss * count, count])} for count in (1.0, 3.0)]
        verdicts.append(bool(found.judge(reports, number).is_spike))
    return verdicts


def test_a_loss_far_above_the_last_ones_is_a_spike() -> None:
    found = spikes()
    assert judge(found, 9.0, *USUAL[1:]) == [False] * 4  # until the history is full, nothing is
    found = spikes()
    judge(found, *USUAL)
    mean, deviation = torch.tensor(USUAL).mean(), torch.tensor(USUAL).std(correction=0)
    verdict = found.judge([{"lm loss": torch.tensor(2.3)}], 5)
    assert float(verdict.z_score) == pytest.approx(float((2.3 - mean) / deviation), rel=1e-5)
    assert not verdict.is_spike and verdict.update_allowed
    assert judge(found, 4.0, first=6) == [True] and not found.update_allowed
    assert judge(found, -40.0, first=7) == [False] and found.update_allowed  # only a rise is a spike


def test_spikes_and_losses_that_are_not_finite_do_not_enter_the_history() -> None:
    found = spikes()
    judge(found, *USUAL)
    before = found.state_dict()["history"]
    assert judge(found, 8.0, math.nan, math.inf, 8.0) == [True, False, True, True]
    assert found.state_dict()["history"] == before
    judge(found, 2.2)
    assert found.state_dict()["history"] == pytest.approx([2.2, 2.1, 1.9, 2.0])


def test_skipping_ends_after_spikes_in_a_row() -> None:
    found = spikes(limit=3)
    assert judge(found, *USUAL, 9.0, 9.0, 2.0, 9.0, 9.0)[4:] == [True, True, False, True, True]
    assert not found.ends_run()
    judge(found, 9.0, first=10)
    assert found.ends_run() and found.last_spike() == 10
    judge(found, 2.0, first=11)
    assert not found.update_allowed  # so that the state stays that before the spikes


def test_rewinding_holds_all_updates_until_a_state_is_loaded() -> None:
    found = spikes("rewind")
    judge(found, *USUAL)
    state = json.loads(json.dumps(found.state_dict()))
    assert judge(found, 9.0, 2.0, 9.0, first=5) == [True, False, False]
    assert found.ends_run() and not found.update_allowed and found.last_spike() == 5
    found.load_state_dict(state)
    assert not found.ends_run() and found.update_allowed
    assert found.state_dict() == state


def test_a_resumed_run_decides_alike() -> None:
    losses = [*USUAL, 2.2, 9.0, 2.0, 1.7, 5.0, 2.1]
    straight = spikes()
    expected = judge(straight, *losses)
    first, second = spikes(), spikes()
    begun = judge(first, *losses[:6])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + judge(second, *losses[6:], first=7) == expected and sum(expected) == 2
    assert second.state_dict() == straight.state_dict()


def test_a_history_of_another_length_begins_anew() -> None:
    found = spikes()
    judge(found, *USUAL)
    found.load_state_dict({**found.state_dict(), "history": [2.0, 2.0]})
    assert judge(found, 9.0) == [False] and found.state_dict()["count"] == 1
    found.load_state_dict(None)  # a checkpoint of a run without --loss-spike-action
    assert found.state_dict()["count"] == 0
