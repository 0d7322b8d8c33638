"""Losses far above the first ones."""

import pytest

from megatron.training.log.records import Speed, StepRecord
from megatron.training.log.spikes import FIRST, SpikeWatch


def test_a_spike_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    watch = SpikeWatch()
    losses = [2.0] * FIRST + [19.0, 21.0, float("nan"), 3.0]
    watch.steps([StepRecord(number, {"lm loss": loss}, True) for number, loss in enumerate(losses, 1)], Speed(1.0))
    assert capsys.readouterr().out == (
        f"iteration {FIRST + 2}: lm loss 21 is at least 10 times the largest of the first {FIRST} iterations\n"
    )


def test_gradients_far_above_the_first_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """--check-for-large-grads looks at the norm of the gradient, and --check-for-spiky-loss not at it."""
    steps = [StepRecord(n, {"lm loss": 2.0}, True, grad_norm=50.0 if n == FIRST + 1 else 4.0) for n in range(1, 103)]
    for watch in (SpikeWatch(gradients=True), SpikeWatch(losses=False, gradients=True), SpikeWatch()):
        watch.steps(steps, Speed(1.0))
    line = f"iteration {FIRST + 1}: grad norm 50 is at least 10 times the largest of the first {FIRST} iterations\n"
    assert capsys.readouterr().out == 2 * line
