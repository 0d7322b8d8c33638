"""Builds the hybrid model of scripts that are copies of Megatron-LM's pretrain_hybrid.py, which import this module.

Only such scripts use it; our own pretrain_hybrid.py has `build_model`.
"""

from functools import partial
from typing import Any

from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import block_spec_of_flag
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import core_transformer_config_from_args


def hybrid_builder(
    args: Any,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> HybridModel:
    """Returns the part of a hybrid model on a (virtual) pipeline stage, by the arguments (`get_args()`). `config`
    replaces the model config of the arguments."""
    given = args.spec is not None and args.spec != ["local"]
    return HybridModel(
        config=core_transformer_config_from_args(args) if config is None else config,
        hybrid_stack_spec=partial(block_spec_of_flag, args.spec) if given else hybrid_stack_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
