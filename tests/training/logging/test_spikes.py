"""Losses far above the first ones."""

import pytest

from megatron.training.logging.records import Speed, StepRecord
from megatron.training.logging.spikes import FIRST, SpikeWatch


def test_a_spike_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    watch = SpikeWatch()
    losses = [2.0] * FIRST + [19.0, 21.0, float("nan"), 3.0]
    watch.steps([StepRecord(number, {"lm loss": loss}, True) for number, loss in enumerate(losses, 1)], Speed(1.0))
    assert capsys.readouterr().out == (
        f"iteration {FIRST + 2}: lm loss 21 is at least 10 times the largest of the first {FIRST} iterations\n"
    )
