"""A stage of its own for multi-token prediction: only a layout makes one."""

from typing import Any

import pytest

from megatron.core.exceptions import UserError
from megatron.core.transformer.config.stages import has_prediction_stage
from megatron.core.transformer.transformer_config import TransformerConfig


def config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, mtp_num_layers=1, **fields)


@pytest.mark.parametrize(("layout", "apart"), [("Et|t|m|L", True), ("Et|t|mL", False)])
def test_a_layout_says_whether_prediction_has_a_stage(layout: str, apart: bool) -> None:
    made = config(pipeline_model_parallel_layout=layout, pipeline_model_parallel_size=layout.count("|") + 1)
    assert has_prediction_stage(made) is made.mtp_standalone is apart


def test_asking_for_one_without_a_layout_is_refused() -> None:
    assert not config().mtp_standalone
    with pytest.raises(UserError, match=r"mtp_standalone.*as Et\|t\|m\|L; write that"):
        config(mtp_standalone=True)
