"""Specs of BERT layers: those of GPT, whose tokens attend to the tokens on both sides."""

from megatron.core.groups.defaults import pp_rank_or_default
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, gpt_layer_spec_of
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


def get_bert_layer_local_spec() -> ModuleSpec:
    """Returns the spec of a BERT layer in plain torch: norms before attention and MLP."""
    return get_gpt_layer_local_spec(attn_mask_type=AttnMaskType.padding)


def get_bert_layer_with_transformer_engine_spec() -> ModuleSpec:
    """Returns the same as `get_bert_layer_local_spec`: a layer's kernels are chosen by its backend."""
    return get_bert_layer_local_spec()


bert_layer_local_spec = get_bert_layer_local_spec()
bert_layer_with_transformer_engine_spec = get_bert_layer_with_transformer_engine_spec()


def get_bert_encoder_block_spec(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the specs of a BERT's layers on a pipeline stage, and of its last norm, as the config describes them.
    `pp_rank` defaults to this rank's."""
    rank = pp_rank_or_default(pp_rank)
    layers = stage_map(config).stage_at(rank, vp_stage or 0).layers
    specs = [gpt_layer_spec_of(config, number, AttnMaskType.padding) for number in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)
