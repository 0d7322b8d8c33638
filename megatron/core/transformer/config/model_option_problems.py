"""What is wrong with the values of a model's model options: norms, factors, caps and the like."""

import math
from collections.abc import Iterator
from typing import Any


def model_option_problems(config: Any) -> Iterator[str]:
    """A problem for each value, or pair of values, that no layer can honour; `config` has the fields of
    TransformerConfig."""
    for name in ("embedding_multiplier", "residual_multiplier", "logit_scale"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) != 0.0):
            yield f"{{{name}}} must be a number other than 0"
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "clip_qkv", "softmax_scale"):
        value = getattr(config, name)
        if value is not None and not 0.0 < value < math.inf:
            yield f"{{{name}}} must be larger than 0, or left out"
    if config.attention_chunk_size is not None and config.attention_chunk_size < 1:
        yield "{attention_chunk_size} must be at least 1"
    yield from _query_key_problems(config)
    yield from _norm_problems(config)


def _norm_problems(config: Any) -> Iterator[str]:
    if not config.norm_affine and config.layernorm_zero_centered_gamma:
        yield "{layernorm_zero_centered_gamma}: with {norm_affine} norms have no weights"
    if config.norm_placement == "post" and config.apply_residual_connection_post_layernorm:
        yield "{apply_residual_connection_post_layernorm}: with {norm_placement} no norm stands before attention or MLP"


def _query_key_problems(config: Any) -> Iterator[str]:
    if config.qk_layernorm and config.qk_l2_norm:
        yield "{qk_layernorm} and {qk_l2_norm} are two norms of queries and keys; give one"
    if config.qk_layernorm and config.qk_norm_scope == "full" and config.normalization != "RMSNorm":
        yield "{qk_norm_scope} is an RMSNorm; it does not go with {normalization}"
