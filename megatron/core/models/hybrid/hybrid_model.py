"""Hybrid language models under Megatron-LM's name."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from megatron.core.exceptions import UserError
from megatron.core.groups.defaults import groups_or_default
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.layer_patterns import evenly_mixed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class HybridModel(GPTModel):
    """A GPTModel whose layers have one branch each: Mamba-2, a delta net, attention, MLP or experts, in the order of a
    pattern. With the pattern `*-*-` it computes what a GPTModel of two layers computes; see `gpt_spelling`.

    The pattern comes from `hybrid_layer_pattern`, or from `hybrid_override_pattern` (its older name), or from the two
    ratios if one of them is not 0, or from `config.hybrid_layer_pattern`. A config of a hybrid model
    (`is_hybrid_model`, or with the pattern) scales the initial weights of the layers' outputs for one branch a layer;
    another config scales them for two. `hybrid_stack_spec` is the function of this name, or another function with the
    same arguments. The other arguments have the same meaning as in GPTModel.

    Raises UserError for an impossible pattern.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hybrid_stack_spec: Callable[..., TransformerBlockSubmodules],
        vocab_size: int,
        max_sequence_length: int,
        hybrid_layer_pattern: str | None = None,
        hybrid_attention_ratio: float | None = None,
        hybrid_mlp_ratio: float | None = None,
        hybrid_override_pattern: str | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "none",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        *,
        vocab_padding_multiple: int | None = None,
    ) -> None:
        if isinstance(hybrid_stack_spec, ModuleSpec):
            raise UserError(
                "HybridModel: a stack spec is a function (config, vp_stage, pp_rank) here that returns the specs of a "
                "stage's layers; give hybrid_stack_spec, or a function that changes its result"
            )
        pattern = hybrid_layer_pattern or hybrid_override_pattern
        if pattern is None and (hybrid_attention_ratio or hybrid_mlp_ratio):
            pattern = evenly_mixed(config.num_layers, hybrid_attention_ratio or 0.0, hybrid_mlp_ratio or 0.0)
        if pattern is not None and pattern != config.hybrid_layer_pattern:
            config = dataclasses.replace(config, hybrid_layer_pattern=pattern)
        groups = groups_or_default(pg_collection)
        place = {"vp_stage": vp_stage, "pp_rank": groups.rank("pp")}
        layers = hybrid_stack_spec(config, **place)
        super().__init__(
            config,
            layers,
            vocab_size,
            max_sequence_length,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=fp16_lm_cross_entropy,
            parallel_output=parallel_output,
            share_embeddings_and_output_weights=share_embeddings_and_output_weights,
            position_embedding_type=position_embedding_type,
            rotary_percent=rotary_percent,
            rotary_base=rotary_base,
            scatter_embedding_sequence_parallel=scatter_embedding_sequence_parallel,
            seq_len_interpolation_factor=seq_len_interpolation_factor,
            pg_collection=groups,
            vp_stage=vp_stage,
            mtp_block_spec=get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False, **place),
            vocab_padding_multiple=vocab_padding_multiple,
        )
