"""Token mixers other than softmax attention: sparse and linear attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from megatron.core.declarations.config_fields import flag, not_yet, pattern_problems, too_small
from megatron.core.declarations.flag_grammars import layer_pattern
from megatron.core.groups.rank_grid import divisors, parallel_sizes_near
from megatron.core.transformer.layer_patterns import has_mixer

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

_DELTA = "experimental_attention_variant=gated_delta_net"
_DSA = "experimental_attention_variant=dsa"
_HYBRID = "hybrid_layer_pattern"


@dataclass(kw_only=True)
class TokenMixerConfig:
    """Layers with another token mixer than softmax attention, and their sizes."""

    experimental_attention_variant: Literal["gated_delta_net", "dsa"] | None = flag(None, families=("gpt",))
    """Replace attention by another token mixer: gated_delta_net (linear attention with the gated delta rule, in the
    layers of --linear-attention-freq) or dsa (sparse attention with an indexer)."""

    dsa_indexer_n_heads: int | None = flag(None, only_with=_DSA, or_with=_HYBRID)
    """Number of heads of the indexer of sparse attention."""

    dsa_indexer_head_dim: int | None = flag(None, only_with=_DSA, or_with=_HYBRID)
    """Width of one head of the indexer."""

    dsa_indexer_topk: int | None = flag(None, only_with=_DSA, or_with=_HYBRID)
    """Number of keys that the indexer selects for a query."""

    dsa_indexer_topk_freq: int = not_yet(1)
    """Distance between layers that select keys; the layers between them use the previous selection."""

    dsa_indexer_skip_topk_offset: int = not_yet(0)
    """Number of first layers that always select keys themselves."""

    dsa_indexer_loss_coeff: float | None = flag(None, only_with=_DSA, or_with=_HYBRID)
    """Coefficient of the indexer's loss: the Kullback-Leibler divergence of the indexer's distribution over keys from
    attention's, averaged over tokens. Default and 0: no loss, so the indexer's weights do not change."""

    dsa_indexer_use_sparse_loss: bool = flag(False, only_with="dsa_indexer_loss_coeff")
    """Compute the indexer's loss over the selected keys only, not over all keys that a query may see."""

    dsa_indexer_k_norm_epsilon: float | None = flag(None, only_with=_DSA, or_with=_HYBRID)
    """Epsilon of the LayerNorm of the indexer's keys. Default: that of the other norms."""

    dsa_indexer_rope_interleaved: bool = flag(False, only_with=_DSA, or_with=_HYBRID)
    """Rotate neighbouring channels of the indexer's queries and keys, as latent attention does, instead of the halves
    of their rotary part."""

    dsa_indexer_scoring_relu: bool = flag(
        True,
        off="--disable-dsa-indexer-scoring-relu",
        aliases=["--no-dsa-indexer-scoring-relu"],
        only_with=_DSA,
        or_with=_HYBRID,
    )
    """Clamp the indexer's products of queries and keys at 0 before their weighted sum."""

    linear_attention_freq: int | list[int] | None = flag(None, parse=layer_pattern, only_with=_DELTA)
    """Layers with linear attention: all except every N-th, or a list expression with a 1 for each of them. Default:
    all."""

    linear_conv_kernel_dim: int | None = flag(4, only_with=_DELTA, or_with=_HYBRID)
    """Number of tokens that the convolution of a gated delta rule layer reads."""

    linear_key_head_dim: int | None = flag(128, only_with=_DELTA, or_with=_HYBRID)
    """Width of a query or key head of a gated delta rule layer."""

    linear_value_head_dim: int | None = flag(128, only_with=_DELTA, or_with=_HYBRID)
    """Width of a value head of a gated delta rule layer."""

    linear_num_key_heads: int | None = flag(16, only_with=_DELTA, or_with=_HYBRID)
    """Number of query and key heads of a gated delta rule layer. Tensor parallel ranks divide them."""

    linear_num_value_heads: int | None = flag(32, only_with=_DELTA, or_with=_HYBRID)
    """Number of value heads of a gated delta rule layer; a multiple of --linear-num-key-heads."""


_DSA_SIZES = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
_OTHER_SCORES = {
    "window_size": None,
    "attention_chunk_size": None,
    "attn_logit_softcapping": None,
    "alibi": False,
    "softmax_type": "vanilla",
    "cache_mla_latents": False,
}
"""Options of attention that DeepSeek sparse attention does not have, and their values in its layers."""

_DELTA_SIZES = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


def validate(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for each impossible value, or pair of values, of token mixers; `config` has the fields of
    TransformerConfig."""
    if has_mixer(config, "gated_delta_net"):
        yield from _delta_problems(config)
    if has_mixer(config, "dsa"):
        yield from _sparse_problems(config)


def _sparse_problems(config: "TransformerConfig") -> Iterator[str]:
    if not config.multi_latent_attention:
        yield "dsa needs {multi_latent_attention:name}, whose keys its indexer selects"
        return
    for name in _DSA_SIZES:
        if getattr(config, name) is None:
            yield f"dsa needs {{{name}:name}}"
    yield from too_small(config, _DSA_SIZES, 1)
    yield from too_small(config, ("dsa_indexer_loss_coeff",), 0)
    latent = cast("MLATransformerConfig", config)
    width, rotary_dim = config.dsa_indexer_head_dim, int(latent.qk_pos_emb_head_dim * latent.rotary_percent)
    if width is not None and width < rotary_dim:
        yield (
            f"{{dsa_indexer_head_dim}} is less than the {rotary_dim} rotary channels of {{qk_pos_emb_head_dim}}, which "
            f"the indexer's heads have too; {rotary_dim} works"
        )
    for name, plain in _OTHER_SCORES.items():
        if getattr(config, name) != plain:
            yield f"{{{name}}} does not go with dsa; leave it out"


def _delta_problems(config: "TransformerConfig") -> Iterator[str]:
    sizes = {name: getattr(config, name) for name in _DELTA_SIZES}
    missing = [name for name, size in sizes.items() if size is None]
    yield from (f"a gated delta net needs {{{name}:name}}" for name in missing)
    yield from too_small(config, sizes, 1)
    yield from pattern_problems(config, "linear_attention_freq", "with linear attention")
    if missing or min(sizes.values()) < 1:
        return
    keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    tensor = config.tensor_model_parallel_size
    if values % keys:
        below = values - values % keys
        works = f"{below} or {below + keys}" if below else f"{keys}"
        yield f"{{linear_num_value_heads}} is no multiple of {{linear_num_key_heads}}; {works} is"
    if tensor >= 1 and keys % tensor:
        near = parallel_sizes_near(divisors(keys), tensor, config)
        yield f"{{tensor_model_parallel_size}} does not divide {{linear_num_key_heads}}; use {near}"
        return
    context, own = config.context_parallel_size, keys // max(1, tensor)
    if context >= 1 and own % context:
        below = max(size for size in divisors(own) if size < context)
        yield (
            f"{{context_parallel_size}} does not divide the {own} key heads of a gated delta net "
            f"({{linear_num_key_heads:name}}) on a tensor parallel rank; use {below}"
        )
