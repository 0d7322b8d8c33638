"""The loss of one micro-batch as a part of the step's loss, and what is reported."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.communication.collectives import Group, PlannedGroup
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.pipeline_parallel import runner
from megatron.core.pipeline_parallel.runner import StepLosses

OUTPUT = torch.tensor(6.0, dtype=torch.float64)


def step_losses(per_token: bool = False, context: int = 1, scale: Any = None) -> StepLosses:
    groups = ProcessGroupCollection.from_grid(RankGrid(context, context=context), 0)
    return StepLosses(SimpleNamespace(calculate_per_token_loss=per_token), groups, 4, False, scale)


def test_a_loss_of_two_values_is_divided_by_the_micro_batches() -> None:
    """Gradients are averaged over context parallel ranks, so each rank's part counts as often as there are ranks."""
    for context in (1, 2):
        step = step_losses(context=context)
        assert step.record(OUTPUT, lambda output: (output * 2, {"n": 1})).item() == 12.0 * context / 4
        assert step.reports == [{"n": 1}] and step.num_tokens is None


def test_a_loss_of_three_values_is_a_mean_over_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_losses()
    assert step.record(OUTPUT, lambda output: (output, torch.tensor(3), "a")).item() == 6.0 / 3 / 4
    assert step.record(OUTPUT, lambda output: (output, 0, "b")).item() == 6.0 / 4  # a micro-batch without tokens
    assert step.num_tokens is not None and step.num_tokens.dtype is torch.float64
    assert step.num_tokens.item() == 3.0 and step.reports == ["a", "b"]

    def other_rank_has_five(tensor: Tensor, group: Group) -> Tensor:
        assert isinstance(group, PlannedGroup) and group.ranks == (0, 1)
        return tensor.add_(5)

    monkeypatch.setattr(runner, "all_reduce", other_rank_has_five)
    step, tokens = step_losses(context=2), torch.tensor(3)
    assert step.record(OUTPUT, lambda output: (output, tokens, "a")).item() == 6.0 * 2 / 8 / 4
    assert tokens == 3 and step.num_tokens == 3.0  # this rank's own, which finalising sums


def test_with_a_loss_per_token_the_sum_is_left_as_it_is() -> None:
    step = step_losses(per_token=True, context=2)
    assert step.record(OUTPUT, lambda output: (output, 3, "a")).item() == 6.0
    assert step.num_tokens == 3.0


def test_auxiliary_losses_are_scaled_as_the_models_loss() -> None:
    device = torch.device("cpu")
    assert step_losses(context=2).auxiliary_scale(device) == 2 / 4
    assert step_losses(per_token=True, context=2).auxiliary_scale(device) == 1.0
    scaled = step_losses(scale=lambda loss: loss * 1024).auxiliary_scale(device)
    assert scaled == 256.0 and scaled.dtype is torch.float64
