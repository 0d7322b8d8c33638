"""Scaling of rows in a flat range of a matrix. tests/core/transformer/test_attention_logits.py runs the clip."""

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.optimizer.qk_clip import QKClip, scale_rows


@pytest.mark.parametrize(("first", "end"), [(0, 20), (0, 7), (3, 20), (4, 12), (3, 13), (5, 7), (4, 8), (6, 9), (7, 8)])
def test_a_range_of_rows(first: int, end: int) -> None:
    matrix = torch.arange(20, dtype=torch.float64) + 1.0
    factors = torch.tensor([1.0, 0.5, 0.25, 2.0, 3.0], dtype=torch.float64)
    wanted = matrix * factors.repeat_interleave(4)
    part = matrix[first:end].clone()
    scale_rows(part, factors, first, 4)
    assert torch.equal(part, wanted[first:end])


def test_biases_have_rows_of_one_element() -> None:
    part = torch.ones(3)
    scale_rows(part, torch.tensor([1.0, 2.0, 3.0, 4.0]), 1, 1)
    assert part.tolist() == [2.0, 3.0, 4.0]


def test_an_optimizer_without_it_is_refused() -> None:
    chunk = torch.nn.Linear(2, 2)
    QKClip.refuse([chunk], "mine")
    chunk.config = type("Config", (), {"log_max_attention_logit": True})()  # type: ignore[assignment]
    with pytest.raises(UserError, match="--log-max-attention-logit: mine does not support it"):
        QKClip.refuse([chunk], "mine")
