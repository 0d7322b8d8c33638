"""Results of training steps for tests of the log."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.optimizer import StepUpdate
from megatron.training.log.records import StepResult
from megatron.training.state import TrainState


def step(
    iteration: int,
    reports: Sequence[Mapping[str, Tensor]],
    *,
    update_applied: Tensor | None = None,
    grad_norm: Tensor | None = None,
    num_zeros: Tensor | None = None,
    learning_rate: Tensor | None = None,
    loss_scale: float = 1.0,
    global_batch_size: int = 1,
    consumed_samples: int = 0,
    tokens: int = 0,
    skipped_samples: int = 0,
    **values: Any,
) -> tuple[StepResult, TrainState]:
    """Returns the arguments of `TrainingLog.step` and of `StepMetrics.record`. Values that are not given are ordinary:
    the update was applied, and all numbers are 1. `values` are further fields of StepResult."""
    device = next((value.device for report in reports for value in report.values()), torch.device("cpu"))
    one = torch.ones((), dtype=torch.float64, device=device)
    update = StepUpdate(
        one if grad_norm is None else grad_norm,
        one.bool() if update_applied is None else update_applied,
        num_zeros,
    )
    rate = one if learning_rate is None else learning_rate
    result = StepResult(reports, update, rate, one * loss_scale, global_batch_size, **values)
    return result, TrainState(iteration, consumed_samples, skipped_samples, consumed_tokens=tokens)
