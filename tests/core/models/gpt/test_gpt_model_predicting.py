"""Stages of a GPT that predicts several tokens ahead. tests/parity compares its steps with those of one process."""

from typing import Any

import pytest
import torch
from support.predicting_gpt import predicting_config, predicting_model, whole_batch

from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.transformer.layer_metrics import take_layer_metrics


def stages(ranks: int, layout: str | None = None, **more: Any) -> dict[str, Any]:
    return {"pipeline_model_parallel_size": ranks, "pipeline_model_parallel_layout": layout, **more}


def test_who_holds_a_copy_needs_a_group() -> None:
    """Groups as they are made for models that predict one token."""
    config = predicting_config(**stages(4, "Et|t|mm|L"))
    groups = ProcessGroupCollection.from_grid(RankGrid(4, pipeline=4), 2)
    with pytest.raises(UserError, match=r"embedding.word_embeddings.weight is also on this pipeline stage.*embd"):
        predicting_model(config, groups, pre_process=False, post_process=False)
    groups = ProcessGroupCollection.from_grid(RankGrid(2, pipeline=2), 1)
    with pytest.raises(UserError, match=r"position_embeddings.weight .*\(get_position_embedding_ranks=...\)"):
        predicting_model(predicting_config(**stages(2)), groups, pre_process=False)


def test_a_stage_behind_knows_its_tokens_by_what_it_gets() -> None:
    """Without ids and a record of the tokens: a third of the hidden states are the decoder's."""
    config = predicting_config(**stages(4, "Et|t|mm|L"))
    groups = ProcessGroupCollection.from_grid(RankGrid(4, pipeline=4), 3)
    model = predicting_model(config, groups, pre_process=False)
    hidden = torch.randn(3 * 16, 2, 16, dtype=torch.float64, requires_grad=True)
    labels = whole_batch()[1]
    model.set_input_tensor(hidden)
    losses = model(None, labels=labels)
    assert losses.shape == (2, 16) and [report.name for report in take_layer_metrics([model])] == [
        "mtp_1 loss",
        "mtp_2 loss",
    ]
    losses.sum().backward()
    assert all(part.abs().sum() > 0 for part in hidden.grad.chunk(3))
