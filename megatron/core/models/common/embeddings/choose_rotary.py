"""Choice of a model's rotary positions."""

from megatron.core.models.common.embeddings.latent_rotary_embedding import latent_rotary_embedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding, rope_scaling_of
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


def choose_rotary_embeddings(
    config: TransformerConfig,
    position_embedding_type: str,
    *,
    percent: float,
    base: float,
    interpolation: float | None,
    llama3: bool,
    factor: float,
) -> tuple[RotaryEmbedding | None, RotaryEmbedding | None]:
    """Returns the rotary embedding of the model, or None, and that of windowed layers, or None if they have no
    frequencies of their own. The keywords are a model's `rotary_percent`, `rotary_base`,
    `seq_len_interpolation_factor`, `rope_scaling` and `rope_scaling_factor`; latent attention takes everything from the
    config instead."""
    if isinstance(config, MLATransformerConfig) and config.multi_latent_attention:
        return latent_rotary_embedding(config), None
    if position_embedding_type != "rope":
        return None, None
    assert config.kv_channels is not None
    scaling = rope_scaling_of(config, factor, llama3=llama3)
    rotary = RotaryEmbedding(
        config.kv_channels, percent, config.rotary_interleaved, interpolation, base, scaling=scaling
    )
    if config.rotary_base_local is None or config.window_size is None:
        return rotary, None
    local = RotaryEmbedding(
        config.kv_channels, percent, config.rotary_interleaved, rotary_base=config.rotary_base_local
    )
    return rotary, local
