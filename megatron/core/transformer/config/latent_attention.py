"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): the fields of MLATransformerConfig."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from megatron.core.declarations.config_fields import flag, not_a_flag, too_small

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

_YARN = "rope_type=yarn"
_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_POSITIVE = ("rotary_scaling_factor", "original_max_position_embeddings", "beta_slow")
_OTHER_ATTENTION = {
    "qk_l2_norm": "its norms are those of the latents ({qk_layernorm:name})",
    "clip_qkv": "its queries, keys and values come from latents",
    "nope_temperature_scale": "its queries are not scaled by position",
    "attention_output_gate": "its output has no gate",
    "rotary_interleaved": "it always rotates neighbouring pairs",
    "rope_scaling_type": "{rope_type:name} chooses how its frequencies are scaled",
    "rotary_base_local": "all its layers use {rotary_base:name}",
}
"""Options of other attention that latent attention does not have, each with the reason for the error message."""


@dataclass(kw_only=True)
class LatentAttentionConfig:
    """Sizes and rotary positions of latent attention."""

    q_lora_rank: int | None = flag(512, only_with="multi_latent_attention")
    """Rank of the query projection; None: one full-rank projection."""

    kv_lora_rank: int = flag(512, only_with="multi_latent_attention")
    """Width of the latent from which keys and values are computed."""

    qk_head_dim: int = flag(128, only_with="multi_latent_attention")
    """Width of a query or key head without its rotary part."""

    qk_pos_emb_head_dim: int = flag(64, only_with="multi_latent_attention")
    """Width of the rotary part of a query or key head."""

    v_head_dim: int = flag(128, only_with="multi_latent_attention")
    """Width of a value head."""

    latent_layernorm_epsilon: float | None = flag(None, only_with=("multi_latent_attention", "qk_layernorm"))
    """Epsilon of the norms of the latents (--qk-layernorm). Default: that of the other norms."""

    rope_type: Literal["rope", "yarn"] = flag("yarn", only_with="multi_latent_attention")
    """Kind of rotary positions: rope or yarn."""

    rotary_base: float = not_a_flag(10000)
    """Base of the rotary frequencies."""

    rotary_percent: float = not_a_flag(1.0)
    """Fraction of the rotary part of a head that is rotated."""

    rotary_scaling_factor: float = flag(40, only_with=_YARN)
    """YaRN: factor by which the context is longer than in the original training."""

    original_max_position_embeddings: int = flag(4096, only_with=_YARN)
    """YaRN: context length of the original training."""

    beta_fast: float = flag(32, only_with=_YARN)
    """YaRN: frequencies with more rotations than this within the original context are not changed."""

    beta_slow: float = flag(1, only_with=_YARN)
    """YaRN: frequencies with fewer rotations than this within the original context are divided by the factor."""

    mscale: float = flag(1.0, only_with=_YARN)
    """YaRN: scale of cosine and sine."""

    mscale_all_dim: float = flag(0.0, only_with=_YARN)
    """YaRN: scale of the softmax."""

    cache_mla_latents: bool = flag(False, only_with="multi_latent_attention")
    """Cache latents instead of keys and values during decoding."""


def validate(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for each value that does not go with `multi_latent_attention`; `config` has the fields of
    MLATransformerConfig, or without latent attention those of TransformerConfig."""
    if not config.multi_latent_attention:
        return
    if not hasattr(config, "kv_lora_rank"):
        yield "{multi_latent_attention:name} needs an MLATransformerConfig, which has its sizes"
        return
    yield from _latent_problems(cast("MLATransformerConfig", config))


def _latent_problems(config: "MLATransformerConfig") -> Iterator[str]:
    yield from too_small(config, _SIZES, 1)
    for name in _POSITIVE:
        if not getattr(config, name) > 0:
            yield f"{{{name}}} must be larger than 0"
    if not config.beta_fast > config.beta_slow:
        yield "{beta_fast} must be larger than {beta_slow}"
    if config.latent_layernorm_epsilon is not None and not config.latent_layernorm_epsilon > 0:
        yield "{latent_layernorm_epsilon} must be larger than 0"
    yield from _position_problems(config)
    heads, groups = config.num_attention_heads, config.num_query_groups
    if groups is not None and heads is not None and groups != heads:
        yield "{num_query_groups} does not go with {multi_latent_attention:name}: every head has keys of its own"
    if config.add_qkv_bias and not config.add_bias_linear:
        yield "{add_qkv_bias} does not go with {multi_latent_attention:name}, whose projections have no biases"
    if config.qk_norm_scope != "head":
        yield "{qk_norm_scope} does not go with {multi_latent_attention:name}, which norms latents"
    for name, instead in _OTHER_ATTENTION.items():
        if getattr(config, name) not in (None, False):
            yield f"{{{name}}} does not go with {{multi_latent_attention:name}}: {instead}"


def _position_problems(config: "MLATransformerConfig") -> Iterator[str]:
    if config.rope_type not in ("rope", "yarn"):
        yield "{rope_type}: choose among rope, yarn"
    if not config.rotary_base > 1:
        yield "{rotary_base} must be larger than 1"
    for name in ("mscale", "mscale_all_dim"):
        if not math.isfinite(getattr(config, name)):
            yield f"{{{name}}} must be a number"
    if not 0.0 < config.rotary_percent <= 1.0:
        yield "{rotary_percent} must be larger than 0 and at most 1"
        return
    rotary_dim = int(config.qk_pos_emb_head_dim * config.rotary_percent)
    if config.qk_pos_emb_head_dim >= 1 and (rotary_dim < 2 or rotary_dim % 2):
        yield (
            f"{{rotary_percent}} of {{qk_pos_emb_head_dim}} rotates {rotary_dim} channels of a head; "
            "it must be an even number, such as those of 64"
        )
