"""Layers of BERT: as many as a stage has. `test_bert_model` shows that tokens attend to both sides."""

from support.tiny_models import tiny_config

from megatron.core.models.bert.bert_layer_specs import get_bert_encoder_block_spec


def test_a_stage_has_its_layers() -> None:
    config = tiny_config(num_layers=6, pipeline_model_parallel_size=3)
    for rank in range(3):
        specs = get_bert_encoder_block_spec(config, pp_rank=rank).layer_specs
        assert specs is not None and len(specs) == 2
