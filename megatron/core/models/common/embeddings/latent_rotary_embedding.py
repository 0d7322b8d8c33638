"""Rotary positions of multi-head latent attention."""

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.ops.rope_frequencies import RopeScaling, yarn_concentration
from megatron.core.transformer.transformer_config import MLATransformerConfig


def latent_rotary_embedding(config: MLATransformerConfig) -> RotaryEmbedding:
    """Of the `qk_pos_emb_head_dim` channels of a head that know positions; with `rope_type` yarn for rows that are
    `rotary_scaling_factor` times as long as `original_max_position_embeddings`.

    Channels turn in pairs of neighbours. (In the published models a head is first put in another order, even channels
    before odd ones, and halves are turned: of queries and of keys alike, so that their products are the same.)
    """
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
