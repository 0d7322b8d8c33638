"""Counts updates that are skipped in a row, on the device, and says when there are too many (--max-consecutive-skips).

A weight that is not finite makes every later loss NaN. A run that skips such updates would do so for ever.
"""

import torch
from torch import Tensor

from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.log.records import StepResult


class SkippedUpdates:
    """Counts the updates skipped in a row. All ranks count alike, because all skip the same updates. Never waits for
    the device.

    Args:
        limit: number of skipped updates in a row that ends the run.
        device: where the results of steps live.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit = limit
        self._in_row = torch.zeros((), dtype=torch.int64, device=device)
        self._too_many = torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda")

    @torch.no_grad()
    def count(self, result: StepResult, loss_scale: Tensor) -> None:
        """Counts the update of a step; `loss_scale` is the one after it. An update that lowered the loss scale, or that
        was refused as a loss spike, does not count."""
        applied = result.update.update_applied
        counts = ~applied & (loss_scale >= result.loss_scale)
        if result.spike is not None:
            counts &= result.spike.update_allowed
        self._in_row.copy_(torch.where(applied, 0, self._in_row + counts))
        self._too_many.copy_(self._in_row >= self.limit, non_blocking=True)

    def too_many(self) -> bool:
        """Returns whether the limit is reached. On a GPU the answer may be a step or two late."""
        return bool(self._too_many)


def count_of_skipped_updates(config: PretrainConfig, device: torch.device) -> SkippedUpdates:
    """Returns the counter of a run. With float16 the limit is at least --hysteresis: so many overflows in a row may
    pass before the first one lowers the loss scale."""
    optimizer, limit = config.optimizer, config.resilience.max_consecutive_skips
    return SkippedUpdates(max(limit, optimizer.hysteresis) if optimizer.fp16 else limit, device)
