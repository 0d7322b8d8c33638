"""Attention: heads, scale, mask, positions, statistics."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.core.declarations.config_fields import flag, not_yet, pattern_problems, too_small
from megatron.core.declarations.flag_grammars import layer_pattern, window
from megatron.core.groups.rank_grid import divisors
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.layer_patterns import has_heads

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(kw_only=True)
class AttentionConfig:
    """Heads, masks and options of scaled dot-product attention."""

    attention_backend: AttnBackend = AttnBackend.auto
    """Implementation of attention: flash (FlashAttention-3 where it is installed), fused (cuDNN), unfused (also called
    local), or auto, which uses the fastest one that supports the layer. If the one that is named does not support a
    layer, the next one computes it, and a line says so."""

    softmax_scale: float | None = None
    """Factor of the attention scores. Default: 1 / sqrt(width of a query head); with --multi-latent-attention the
    factor of YaRN."""

    attn_logit_softcapping: float | None = None
    """Soft bound c of the attention scores: c tanh(score / c)."""

    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Extra term in the denominator of the softmax: none (vanilla), 1 (off-by-one), or the exponential of a learnt
    logit per head (learnable)."""

    num_query_groups: int | None = flag(None, only_with="group_query_attention")
    """With --group-query-attention: number of key and value heads; each is shared by a group of query heads."""

    kv_channels: int | None = None
    """Width of one head. Default: hidden size / heads."""

    attention_dropout: float = 0.1
    """Dropout probability of the attention weights."""

    add_qkv_bias: bool = flag(False, only_with="add_bias_linear!=True")
    """Give the QKV projection a bias even with --disable-bias-linear."""

    rotary_interleaved: bool = flag(False, only_with="position_embedding_type=rope", or_with="multi_latent_attention")
    """Rotate pairs of neighbouring channels (2i, 2i+1) instead of (i, i + d/2)."""

    no_rope_freq: int | list[int] | None = flag(
        None, parse=layer_pattern, only_with="position_embedding_type=rope", or_with="multi_latent_attention"
    )
    """Layers without rotary positions: every N-th, or a list expression with a 1 for each layer without."""

    mrope_section: list[int] | None = not_yet(None)
    """Number of channels whose rotary positions encode time, height and width."""

    window_size: tuple[int, int] | None = flag(None, parse=window)
    """Sliding window: number of keys to the left and to the right that a query attends to, for example `127,0`; -1
    means all."""

    window_attn_skip_freq: int | list[int] | None = flag(None, parse=layer_pattern, only_with="window_size")
    """With --window-size: layers with full attention: every N-th, or a list expression with a 0 for each of them."""

    attention_chunk_size: int | None = None
    """Chunked attention: a query attends only to the keys of its own chunk of this many tokens. Chunks are counted from
    the start of the row or document."""

    attention_chunk_skip_freq: int | list[int] | None = flag(
        None, parse=layer_pattern, only_with="attention_chunk_size"
    )
    """With --attention-chunk-size: layers with full attention: every N-th, or a list expression with a 0 for each of
    them."""

    clip_qkv: float | None = None
    """Clamp queries, keys and values to this absolute value, before their norms and rotary positions."""

    qk_layernorm: bool = False
    """Norm queries and keys, with the same kind of norm as the layers."""

    qk_norm_scope: Literal["head", "per_head", "full"] = flag("head", only_with="qk_layernorm")
    """With --qk-layernorm: norm each head by itself, with one weight for all heads (head) or with weights of its own
    (per_head), or norm all heads of a token together (full)."""

    qk_l2_norm: bool = flag(False, only_with="position_embedding_type=rope", or_with="multi_latent_attention")
    """Scale each query and key head to a root mean square of 1, without weights, in layers with rotary positions."""

    qk_l2_norm_epsilon: float = flag(1e-6, only_with="qk_l2_norm")
    """With --qk-l2-norm: added to the mean square of a head."""

    qk_clip: bool = False
    """QK-Clip (MuonClip): after each update, scale the query and key weights of a head down if its largest attention
    logit of the step was above --qk-clip-threshold. Computes the scores of attention once more."""

    qk_clip_alpha: float = flag(0.5, only_with="qk_clip")
    """With --qk-clip: the share of the scaling that is applied to the queries, from 0 to 1."""

    qk_clip_threshold: float = flag(100, only_with="qk_clip")
    """With --qk-clip: logits up to this value are not scaled."""

    log_max_attention_logit: bool = False
    """Log the largest attention logit of each step, over all layers, heads and tokens. Computes the scores of attention
    once more."""

    attention_output_gate: bool = False
    """Multiply the output of attention by the sigmoid of a gate, a linear projection of the same tokens."""

    apply_query_key_layer_scaling: bool = flag(
        False, no_effect="it cancels out, because the softmax is computed in float32"
    )
    """Divide attention scores by the layer number before the softmax and multiply by it inside, to avoid overflow in
    float16."""

    attention_softmax_in_fp32: bool = flag(True, no_effect="softmax is always computed in float32 at least")
    """Compute the softmax of attention in float32."""

    multi_latent_attention: bool = False
    """Use multi-head latent attention: keys and values are computed from a low-rank latent. A part of each head has
    rotary positions under every --position-embedding-type."""

    cp_comm_type: str | list[str] | None = flag(
        None, only_with="context_parallel_size", nargs="+", from_checkpoint=True
    )
    """With --context-parallel-size: how ranks exchange keys and values: p2p (also for all_gather), a2a or a2a+p2p; one
    for all layers or one per layer."""


def validate(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for each impossible value of `AttentionConfig`; `config` has the fields of TransformerConfig."""
    yield from too_small(config, ("kv_channels", "num_query_groups", "attention_chunk_size"), 1)
    if not 0.0 <= config.attention_dropout < 1.0:
        yield "{attention_dropout} must be at least 0 and less than 1"
    if config.window_size is not None and min(config.window_size) < -1:
        yield "{window_size}: give the numbers of earlier and of later keys, such as 127,0; -1 means all"
    yield from pattern_problems(config, "no_rope_freq", "without rotary positions")
    yield from pattern_problems(config, "window_attn_skip_freq", "with a window")
    yield from pattern_problems(config, "attention_chunk_skip_freq", "with chunks")
    if not 0.0 <= config.qk_l2_norm_epsilon < math.inf:
        yield "{qk_l2_norm_epsilon} must be at least 0"
    for name in ("attn_logit_softcapping", "clip_qkv", "softmax_scale"):
        value = getattr(config, name)
        if value is not None and not 0.0 < value < math.inf:
            yield f"{{{name}}} must be larger than 0, or left out"
    if config.deterministic_mode and config.attention_backend is AttnBackend.fused:
        yield (
            "{attention_backend}: cuDNN sums gradients in an order that varies, so {deterministic_mode:name} forbids "
            "it; {attention_backend:name} auto works"
        )
    if (config.hidden_size or 0) >= 1 and (config.num_attention_heads or 0) >= 1 and has_heads(config):
        yield from _head_problems(config)
    yield from _query_key_problems(config)


def _head_problems(config: "TransformerConfig") -> Iterator[str]:
    heads, groups = config.num_attention_heads, config.num_query_groups
    if config.kv_channels is None and config.hidden_size % heads and not config.multi_latent_attention:
        below = config.hidden_size - config.hidden_size % heads
        works = " or ".join(str(size) for size in (below, below + heads) if size > 0)
        yield (f"{{hidden_size}} is not divisible by {{num_attention_heads}}; use {works}, or set {{kv_channels:name}}")
    if groups is not None and groups > 0 and heads % groups:
        nearest = min(divisors(heads), key=lambda divisor: abs(divisor - groups))
        yield f"{{num_query_groups}} does not divide {{num_attention_heads}}; use {nearest}"


def _query_key_problems(config: "TransformerConfig") -> Iterator[str]:
    if config.qk_layernorm and config.qk_l2_norm:
        yield "{qk_layernorm} and {qk_l2_norm} are two norms of queries and keys; give one"
    if not 0.0 <= config.qk_clip_alpha <= 1.0:
        yield "{qk_clip_alpha} must be from 0 to 1"
    if not 0.0 < config.qk_clip_threshold < math.inf:
        yield "{qk_clip_threshold} must be larger than 0"
    if config.qk_clip and (config.qk_l2_norm or (config.qk_layernorm and not config.multi_latent_attention)):
        norm = "qk_l2_norm" if config.qk_l2_norm else "qk_layernorm"
        yield f"{{qk_clip}} scales weights, and {{{norm}}} removes their scale again; give one of them"
    if config.qk_layernorm and config.qk_norm_scope == "full" and config.normalization != "RMSNorm":
        yield "{qk_norm_scope} is an RMSNorm; it does not go with {normalization}"
    has_bias = config.normalization == "LayerNorm" and config.norm_affine and config.norm_bias
    if config.qk_layernorm and config.qk_norm_scope == "per_head" and has_bias:
        yield "{qk_norm_scope} is a norm without a bias; add --no-norm-bias"
