"""Builds the GPT of scripts that are copies of Megatron-LM's pretrain_gpt.py, which import this module by its name.

Only such scripts use it; our own pretrain_gpt.py has `build_model`.
"""

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import block_spec_of_flag
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import core_transformer_config_from_args


def gpt_builder(
    args: Any,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> GPTModel:
    """Returns the part of a GPT on a (virtual) pipeline stage, by the arguments (`get_args()`). `config` replaces the
    model config of the arguments."""
    config = core_transformer_config_from_args(args) if config is None else config
    if args.spec is not None and args.spec != ["local"]:
        layers = block_spec_of_flag(args.spec, config, vp_stage, None)
    else:
        layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
