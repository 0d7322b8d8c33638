"""Megatron-LM's class for layouts: what it counts, and as the value of a config."""

import pytest
from support.tiny_models import tiny_config

from megatron.core.exceptions import UserError
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build

NAMES = [["embedding", "decoder"], ["decoder"] * 2, ["decoder"], ["decoder", "loss"]]


def test_text_and_names_give_the_same_layout() -> None:
    layout = PipelineParallelLayerLayout("Et|tt|t|tL", 2)
    assert layout == PipelineParallelLayerLayout(NAMES, 2) == ["Et", "tt", "t", "tL"]
    assert PipelineParallelLayerLayout.parse_str_to_list("Et|tt|t|tL") == NAMES
    assert layout.virtual_pipeline_model_parallel_size == 2
    assert [layout.get_num_layers_to_build(vp_stage=v, pp_rank=p) for v in (0, 1) for p in (0, 1)] == [1, 2, 1, 1]
    assert layout.get_layer_id_list(vp_stage=0, pp_rank=1) == [1, 2]
    assert layout.get_layer_offset(LayerType.loss, vp_stage=1, pp_rank=1) == 0


def test_a_config_takes_it() -> None:
    config = tiny_config(
        num_layers=5,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout=PipelineParallelLayerLayout.from_str("Et|tt|t|tL", 2),
    )
    assert [get_num_layers_to_build(config, chunk, rank) for rank in (0, 1) for chunk in (0, 1)] == [1, 1, 2, 1]


def test_wrong_layouts_are_refused() -> None:
    with pytest.raises(UserError, match="3 stages, which 2 pipeline ranks"):
        PipelineParallelLayerLayout("E|t|L", 2)
    with pytest.raises(UserError, match="pipeline_model_parallel_layout 5: expected a string"):
        PipelineParallelLayerLayout(5, 1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="'decode' in the stage"):
        PipelineParallelLayerLayout([["decode"]], 1)
