"""Skipped updates are counted in a row. tests/diagnosis/test_non_finite.py trains until there are too many."""

import torch

from megatron.core.optimizer import StepUpdate
from megatron.training.log.records import StepResult
from megatron.training.loss_spikes import SpikeVerdict
from megatron.training.skipped_updates import SkippedUpdates

ONE = torch.ones(())


def result(applied: bool, scale: float = 1.0, allowed: bool | None = None) -> StepResult:
    update = StepUpdate(ONE, torch.tensor(applied))
    spike = None if allowed is None else SpikeVerdict(ONE, torch.tensor(not allowed), torch.tensor(allowed))
    return StepResult([], update, ONE, torch.tensor(scale), 4, spike=spike)


def skips_after(*steps: tuple[StepResult, float], limit: int = 2) -> bool:
    skips = SkippedUpdates(limit, torch.device("cpu"))
    for step, scale in steps:
        skips.count(step, torch.tensor(scale))
    return skips.too_many()


def test_only_skips_in_a_row_count():
    skipped, applied = (result(False), 1.0), (result(True), 1.0)
    assert skips_after(skipped, skipped) and not skips_after(skipped)
    assert not skips_after(skipped, applied, skipped) and skips_after(applied, skipped, skipped)


def test_a_lower_loss_scale_is_progress_and_no_end_of_the_row():
    lowered, stuck = (result(False, 8.0), 4.0), (result(False, 4.0), 4.0)
    assert not skips_after(*[lowered] * 9)
    assert skips_after(stuck, lowered, stuck) and not skips_after(lowered, stuck)


def test_spikes_have_a_limit_of_their_own():
    spike, skipped = (result(False, allowed=False), 1.0), (result(False, allowed=True), 1.0)
    assert not skips_after(*[spike] * 5) and skips_after(skipped, spike, skipped)
