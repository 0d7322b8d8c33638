"""Tokens ahead and their losses, with one rank; `transformer/test_multi_token_prediction` has whole models."""

from typing import Any

import pytest
import torch
from support.tiny_models import tiny_config
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.models.common.predictions import PredictionLosses, TokensAhead, tokens_ahead
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_metrics import take_layer_metrics

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
NOTHING: dict[str, Any] = {"ids": None, "reads_ids": False, "reads_positions": False, "labels": None, "loss_mask": None}


def ahead(**fields: Any) -> list[TokensAhead]:
    return tokens_ahead(2, Tokens(4, 2), None, **{**NOTHING, **fields})


def test_each_depth_reads_one_token_further() -> None:
    first, second = ahead(ids=IDS, reads_ids=True, reads_positions=True)
    assert first.ids is not None and second.ids is not None and first.positions is not None
    assert first.ids.tolist() == [[2, 3, 4, 0], [6, 7, 8, 0]] and second.ids.tolist() == [[3, 4, 0, 0], [7, 8, 0, 0]]
    assert first.positions.tolist() == [[1, 2, 3, 0]] * 2 and first.labels is None


def test_labels_come_with_a_mask() -> None:
    first, _ = ahead(labels=IDS)
    assert first.ids is None and first.loss_mask is not None and first.loss_mask.tolist() == [[1, 1, 1, 0]] * 2


def test_a_stage_that_predicts_needs_ids() -> None:
    with pytest.raises(UserError, match="needs input_ids"):
        ahead(reads_ids=True)


@pytest.mark.parametrize("per_token", [False, True])
def test_losses_reach_the_hidden_states_by_weight_mask_and_scale(per_token: bool) -> None:
    config = tiny_config(
        num_layers=3, mtp_num_layers=2, mtp_loss_scaling_factor=0.3, calculate_per_token_loss=per_token
    )
    losses = PredictionLosses(config)
    hidden = [torch.ones(4, 2, 1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    carrier = torch.zeros(4, 2, 1, dtype=torch.float64, requires_grad=True)

    def head(states: Tensor, labels: Tensor) -> Tensor:
        return states[..., 0] * labels.t()

    tied = losses(carrier, hidden, ahead(labels=IDS), head, None, torch.tensor(7.0, dtype=torch.float64))
    assert torch.equal(tied, carrier)
    tied.sum().backward()
    for depth, state in enumerate(hidden, 1):
        shifted = torch.cat([IDS[:, depth:], torch.zeros(2, depth, dtype=torch.int64)], 1).double()
        count = 1.0 if per_token else float((shifted > 0).sum())
        assert state.grad is not None
        torch.testing.assert_close(state.grad[..., 0], 7.0 * 0.3 / 2 * shifted.t() / count)
    first, second = take_layer_metrics([losses])
    assert (first.name, first.layer, second.layer) == ("mtp_1 loss", 4, 5)
    assert float(first.total) == float(IDS[:, 1:].sum()) and float(first.count) == 6
