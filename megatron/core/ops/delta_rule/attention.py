"""The gated delta rule as a layer uses it: with queries and keys of unit length, and decays and strengths that are
computed from the layer's projection."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.delta_rule.chunked import gated_delta_rule
from megatron.core.ops.precision import widened

KEY_EPSILON = 1e-6
"""Added to the squared length of queries and keys before they are divided by their length, as in Qwen3-Next."""


def delta_rule_attention(
    mixed: Tensor,
    fading: Tensor,
    strength: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    widths: tuple[int, int],
    document: Tensor | None = None,
) -> Tensor:
    """Returns the outputs [s, b, g n, dv] of `gated_delta_rule` for g key heads that have n value heads each.

    `mixed` [s, b, g, 2 dk + n dv] holds the query, the key and the values of each key head, and `widths` is (dk, dv).
    `fading`, `strength` are [s, b, g, n], `log_rate`, `bias` [g n]:

        q' = q / (|q| sqrt(dk)),  k' = k / |k|,  log_decay = -exp(log_rate) softplus(fading + bias),
        beta = sigmoid(strength)
    """
    log_decay = log_decays(fading, log_rate, bias)
    return gated_delta_rule(*split_heads_of_unit_length(mixed, widths), log_decay, betas(strength), document)[0]


def split_heads_of_unit_length(mixed: Tensor, widths: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the queries q' and keys k' [s, b, g, dk], and the values [s, b, g n, dv]."""
    key_width, value_width = widths
    query, key, value = mixed.split([key_width, key_width, mixed.shape[-1] - 2 * key_width], -1)
    query = _of_unit_length(query) * key_width**-0.5
    return query, _of_unit_length(key), value.reshape(*value.shape[:2], -1, value_width)


def log_decays(fading: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
    """Returns the logarithms of the decays, [s, b, g n]."""
    return -widened(log_rate).exp() * F.softplus(widened(fading.flatten(2)) + widened(bias))


def betas(strength: Tensor) -> Tensor:
    """Returns the strengths of the corrections, [s, b, g n]."""
    return widened(strength.flatten(2)).sigmoid()


def _of_unit_length(heads: Tensor) -> Tensor:
    """Returns the heads [..., d] divided by their lengths, in float32 at least."""
    wide = widened(heads)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + KEY_EPSILON)
