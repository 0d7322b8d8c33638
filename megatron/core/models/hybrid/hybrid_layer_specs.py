"""Specs of the layers of hybrid models, under Megatron-LM's name."""

from megatron.core.exceptions import UserError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


def hybrid_stack_spec(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the specs of the layers of a pipeline stage that the letters of `config.hybrid_layer_pattern` describe.
    Raises UserError if the config is not that of a hybrid model."""
    if not config.is_hybrid_model:
        raise UserError("hybrid_stack_spec: the model is not hybrid; give hybrid_layer_pattern, or is_hybrid_model")
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage, pp_rank=pp_rank)
