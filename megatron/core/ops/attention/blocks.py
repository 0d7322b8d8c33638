"""Attention of one block of queries to one block of keys, for rows that are split over ranks.

A block's result is its output and the log-sum-exp (lse) of each query's scores; with the lse, results for different
keys merge exactly. The backward of a block needs only the final output and lse of its queries (Dao et al. 2022; Liu et
al. 2023, "Ring attention with blockwise transformers"). This file has the reference, for any device, type and feature,
and the merging; `blocks_cuda` has the fast kernels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.ops.attention.unfused import SCORES_AT_ONCE, AttentionVariant, document_of
from megatron.core.ops.dropout.dropout import DropoutRngPosition, keep_attention
from megatron.core.ops.precision import widened


@dataclass(frozen=True)
class BlockOffsets:
    """Position of a block of consecutive queries and consecutive keys in a row, and which queries see which keys."""

    query_start: int
    """Position of the first query in the row."""
    key_start: int
    """Position of the first key in the row."""
    left: int | None
    """Query i sees key j, both counted within the block, if j >= i - left; None: no limit. May be negative."""
    right: int | None
    """Query i sees key j only if also j <= i + right; None: no limit."""


@dataclass(frozen=True)
class BlockCall:
    """The arguments that all blocks of one call share, besides the layer's variant."""

    cu_seqlens: Tensor | None = None
    """Boundaries of the packed documents of the whole row (b = 1): queries see keys of their own document only."""
    max_seqlen: int | None = None
    """Length of the longest packed document."""
    dropout: DropoutRngPosition | None = None
    """None: nothing is dropped."""
    row_start: Tensor | None = None
    """With `dropout`: global index of the first token of each whole row, int64 [b]."""
    first_head: int = 0
    """Index of this rank's first head, counted over the whole model."""


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: BlockOffsets, variant: AttentionVariant, call: BlockCall
) -> tuple[Tensor, Tensor]:
    """Computes attention of a block's queries to the block's keys, without the variant's sink.

    query [sq, b, a, d], key [sk, b, g, d], value [sk, b, g, dv] -> output [sq, b, a, dv] in the type given and
    lse [b, a, sq] in the wider of that and float32; a query that sees no key has lse -inf and output 0.
    """
    outputs, sums = [], []
    for rows in _rows_at_once(query, key):
        scores, _, keep = _scores(query, key, rows, offsets, variant, call)
        top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        sums.append((top + total.log()).squeeze(-1))
        weights = weights / total.clamp(min=torch.finfo(scores.dtype).tiny)
        if keep is not None:
            weights = weights * keep / (1.0 - variant.dropout)
        outputs.append(_weighted_sum(weights.to(value.dtype), value))
    return torch.cat(outputs), torch.cat(sums, -1)


def block_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    offsets: BlockOffsets,
    variant: AttentionVariant,
    call: BlockCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a block's contributions to the gradients of query, key and value, each in its tensor's type or wider.

    `gradient` and `output` [sq, b, a, dv] and `lse` [b, a, sq] belong to the block's queries over all their keys (and
    the sink, if there is one).
    """
    delta = (widened(gradient) * widened(output)).sum(-1).permute(1, 2, 0)  # [b, a, sq]
    query_gradients = []
    key_gradient = value_gradient = None
    for rows in _rows_at_once(query, key):
        scores, slope, keep = _scores(query, key, rows, offsets, variant, call)
        weights = torch.exp(scores - lse[..., rows, None])  # [b, a, rows, sk]
        weight_gradient = _by_group(gradient[rows], value) @ _keys_last(value)  # [b, g, a/g * rows, sk]
        weight_gradient = widened(weight_gradient).view_as(weights)
        kept = weights
        if keep is not None:
            factor = keep.to(weights.dtype) / (1.0 - variant.dropout)
            kept, weight_gradient = weights * factor, weight_gradient * factor
        score_gradient = weights * (weight_gradient - delta[..., rows, None]) * variant.scale
        score_gradient = (score_gradient if slope is None else score_gradient * slope).to(query.dtype)
        query_gradients.append(_weighted_sum(score_gradient, key))
        key_part = _summed_over_queries(score_gradient, query[rows], key)
        value_part = _summed_over_queries(kept.to(value.dtype), gradient[rows], value)
        key_gradient = key_part if key_gradient is None else key_gradient + key_part
        value_gradient = value_part if value_gradient is None else value_gradient + value_part
    assert key_gradient is not None and value_gradient is not None
    return torch.cat(query_gradients), key_gradient, value_gradient


def merge_block(total: Tensor, total_lse: Tensor, output: Tensor, lse: Tensor) -> None:
    """Merges the result for further keys into `total` [s, b, a, dv] and `total_lse` [b, a, s], in offsets."""
    merged = torch.logaddexp(total_lse, lse)
    known = merged.clamp(min=torch.finfo(merged.dtype).min)  # if both are -inf, the weights are 0, not NaN
    for_old, for_new = (torch.exp(part - known).permute(2, 0, 1)[..., None] for part in (total_lse, lse))
    total.mul_(for_old).addcmul_(output.to(total.dtype), for_new)
    total_lse.copy_(merged)


# ---------------------------------------------------------------------------------------------------------------------
# Scores, and products in which a/g query heads share a key head


def _rows_at_once(query: Tensor, key: Tensor) -> list[slice]:
    sq, b, a, _ = query.shape
    count = max(1, SCORES_AT_ONCE // (b * a * key.shape[0]))
    return [slice(first, min(first + count, sq)) for first in range(0, sq, count)]


def _scores(
    query: Tensor, key: Tensor, rows: slice, offsets: BlockOffsets, variant: AttentionVariant, call: BlockCall
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the scores of some queries and what backward needs of them.

    Scores [b, a, rows, sk] are float32 at least, and -inf for keys that a query does not see. The second tensor is the
    derivative of capped scores by uncapped ones (None without a cap), the third the dropout mask (None without
    dropout).
    """
    b, a, sk = query.shape[1], query.shape[2], key.shape[0]
    scores = widened(_by_group(query[rows] * variant.scale, key) @ _keys_last(key)).view(b, a, -1, sk)
    i = torch.arange(rows.start, rows.stop, device=query.device)
    j = torch.arange(sk, device=query.device)
    slope = None
    if variant.cap is not None:
        share = torch.tanh(scores / variant.cap)
        scores, slope = variant.cap * share, 1.0 - share.square()
    distance = (j + offsets.key_start) - (i + offsets.query_start)[:, None]
    bias = variant.bias(distance, call.first_head, a)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    hidden = torch.zeros((), dtype=torch.bool, device=query.device)
    if offsets.right is not None:
        hidden = hidden | (j - i[:, None] > offsets.right)
    if offsets.left is not None:
        hidden = hidden | (i[:, None] - j > offsets.left)
    if call.cu_seqlens is not None:
        documents = [document_of(index, call.cu_seqlens) for index in (i + offsets.query_start, j + offsets.key_start)]
        hidden = hidden | (documents[0][:, None] != documents[1])
    keep = None
    if call.dropout is not None and variant.dropout:
        assert call.row_start is not None
        queries, keys = (call.row_start[:, None] + index for index in (i + offsets.query_start, j + offsets.key_start))
        heads = torch.arange(call.first_head, call.first_head + a, device=query.device)
        keep = keep_attention(call.dropout, queries, keys, heads, variant.dropout)
    return scores.masked_fill(hidden, -torch.inf), slope, keep


def _by_group(heads: Tensor, key: Tensor) -> Tensor:
    """[rows, b, a, n] -> [b, g, a/g * rows, n], for the g heads of `key` [sk, b, g, ...]."""
    return heads.permute(1, 2, 0, 3).reshape(heads.shape[1], key.shape[2], -1, heads.shape[3])


def _keys_last(key: Tensor) -> Tensor:
    """[sk, b, g, n] -> [b, g, n, sk]."""
    return key.permute(1, 2, 3, 0)


def _weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """weights [b, a, rows, sk], value [sk, b, g, n] -> [rows, b, a, n]."""
    b, a, rows, sk = weights.shape
    summed = weights.reshape(b, value.shape[2], -1, sk) @ value.permute(1, 2, 0, 3)  # [b, g, a/g * rows, n]
    return summed.view(b, a, rows, -1).permute(2, 0, 1, 3)


def _summed_over_queries(weights: Tensor, heads: Tensor, key: Tensor) -> Tensor:
    """weights [b, a, rows, sk], heads [rows, b, a, n] -> [sk, b, g, n], for the g heads of `key`."""
    b, _, _, sk = weights.shape
    summed = weights.reshape(b, key.shape[2], -1, sk).transpose(2, 3) @ _by_group(heads, key)  # [b, g, sk, n]
    return summed.permute(2, 0, 1, 3)
