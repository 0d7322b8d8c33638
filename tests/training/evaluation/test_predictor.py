"""Predictions of a model's chunks; in layouts they are compared by test_tasks.py and tests/training/hooks."""

from typing import Any

import pytest
import torch
from support.runs import train
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.training.evaluation.predictor import LayoutPredictor, likeliest_tokens

ROWS = [(1, 2, 3, 4), (10, 20, 30), (7, 7, 7, 7, 7, 7)]


def test_a_model_of_a_script_that_takes_no_rows_of_tokens_is_refused() -> None:
    with pytest.raises(UserError, match=r"--eval-tasks: Linear.forward does not take position_ids and tokens"):
        LayoutPredictor([nn.Linear(1, 1)], ProcessGroupCollection(), torch.device("cpu"), 1, 8)


def test_the_likeliest_of_equal_logits_is_the_first() -> None:
    assert likeliest_tokens(torch.tensor([[[1.0, 3.0, 3.0, 0.0]]]), None).tolist() == [[1]]


def test_full_logits_are_those_of_the_model() -> None:
    found: dict[str, Tensor] = {}

    def keep(run: Any) -> None:
        chunk = run.model[0]
        run.hooks.hooks[-1].on_start = lambda iteration: found.update(
            {"ours": run.full_logits(ROWS), "model": [chunk.eval()(torch.tensor([row]), None, None)[0] for row in ROWS]}
        )

    train("--mock-data --train-iters 1", before=keep)
    for number, row in enumerate(ROWS):
        assert torch.equal(found["ours"][number, : len(row)].argmax(-1), found["model"][number].argmax(-1))
        torch.testing.assert_close(found["ours"][number, : len(row)], found["model"][number])
