"""Rotary positions of multi-head latent attention."""

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.ops.rope_frequencies import RopeScaling, yarn_concentration
from megatron.core.transformer.transformer_config import MLATransformerConfig


def latent_rotary_embedding(config: MLATransformerConfig) -> RotaryEmbedding:
    """Returns the rotary embedding of the `qk_pos_emb_head_dim` rotary channels of a head; with `rope_type` yarn for
    rows that are `rotary_scaling_factor` times as long as `original_max_position_embeddings`. Neighbouring pairs of
    channels are rotated. (Published models first reorder a head, even channels before odd ones, and rotate halves. They
    do so for queries and keys alike, so the products are the same.)"""
    scaling = None
    if config.rope_type == "yarn":
        factor = config.rotary_scaling_factor
        scaling = RopeScaling(
            "yarn",
            factor,
            config.original_max_position_embeddings,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            attention_factor=yarn_concentration(factor, config.mscale, config.mscale_all_dim),
        )
    return RotaryEmbedding(
        config.qk_pos_emb_head_dim,
        config.rotary_percent,
        rotary_interleaved=True,
        rotary_base=config.rotary_base,
        scaling=scaling,
    )
