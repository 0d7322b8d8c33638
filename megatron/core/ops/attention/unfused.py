"""Scaled dot-product attention, unfused: every feature, any device, any type. The reference of the faster ones.

Queries are taken a block at a time, so that no [b, heads, s, s] tensor is kept whole; where there is more than one
block, its probabilities are computed again in backward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.core.ops.dropout.dropout import DropoutRngPosition, keep_attention
from megatron.core.ops.precision import widened

SCORES_AT_ONCE = 1 << 25
"""Attention scores that one block of queries may have."""


@dataclass(frozen=True)
class AttentionVariant:
    """What an attention layer computes: what does not change from call to call."""

    scale: float
    """Factor of the scores."""
    causal: bool
    """Query i sees keys up to i + (sk - sq)."""
    window: tuple[int, int] | None = None
    """Query i sees keys from i + (sk - sq) - left to i + (sk - sq) + right; -1: no limit."""
    dropout: float = 0.0
    """Probability that a softmax probability is dropped while training."""
    sink: bool = False
    """One more logit a head stands in the softmax's denominator."""
    widths: tuple[int, int] | None = None
    """Channels of a query or key head, and of a value head; None: not known, and taken to be what a kernel wants."""
    cap: float | None = None
    """Bound c of the scores: c tanh(score / c), after they are scaled."""
    slopes: tuple[float, ...] | None = None
    """Of each head of the whole model: what a score loses for each token between query and key (ALiBi)."""
    chunk: int | None = None
    """Queries see keys of their own chunk of so many tokens only. A call says where chunks begin: as documents do, by
    `cu_seqlens`."""

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many keys a query sees to its left and right, causality included; None: all."""
        left, right = (None if edge < 0 else edge for edge in self.window or (-1, -1))
        if self.chunk is not None:
            left, right = (self.chunk - 1 if edge is None else min(edge, self.chunk - 1) for edge in (left, right))
        return left, 0 if self.causal else right

    def bias(self, distance: Tensor, first_head: int, heads: int) -> Tensor | None:
        """What ALiBi adds to the scores of some heads (Press et al. 2022): distances (key minus query) that broadcast
        to [b, heads, rows, sk] -> float64 of that shape; None: nothing."""
        if self.slopes is None:
            return None
        slopes = torch.tensor(self.slopes[first_head : first_head + heads], dtype=torch.float64, device=distance.device)
        return slopes[:, None, None] * -distance.abs()


@dataclass(frozen=True)
class AttentionCall:
    """What changes from call to call."""

    query_positions: Tensor | None = None
    """int64 [b, sq]: which key each query stands at; None: the queries are the last sq keys."""
    mask: Tensor | None = None
    """bool, broadcasts to [b, heads, sq, sk]; True hides the key, in addition to what the variant hides."""
    cu_seqlens: Tensor | None = None
    """Boundaries of packed documents (b = 1): queries see keys of their own document only."""
    max_seqlen: int | None = None
    """Longest packed document."""
    sink: Tensor | None = None
    """The sink's logit of each head."""
    dropout: DropoutRngPosition | None = None
    """None: nothing is dropped."""
    first_head: int = 0
    """Number of the first head held here, counted over the whole model: a dropout mask depends on it."""


def attention(query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, call: AttentionCall) -> Tensor:
    """softmax(scale q k^T) v. query [sq, b, a, d], key [sk, b, g, d], value [sk, b, g, dv] -> [sq, b, a, dv].

    Each of the g key heads serves a/g consecutive query heads. The softmax is computed in the wider of float32 and the
    type given. A query that sees no key averages over all of them.
    """
    sq, b, a, _ = query.shape
    rows = max(1, SCORES_AT_ONCE // (b * a * key.shape[0]))
    if rows >= sq:
        return _block(query, key, value, variant, call, 0, sq)
    blocks = [
        checkpoint(
            _block,
            query[first : first + rows],
            key,
            value,
            variant,
            call,
            first,
            sq,
            use_reentrant=False,
            preserve_rng_state=False,  # the masks are functions of their place
        )
        for first in range(0, sq, rows)
    ]
    return torch.cat(blocks)


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: AttentionVariant,
    call: AttentionCall,
    first: int,
    sq: int,
) -> Tensor:
    """Attention of a block of queries, the first of which is number `first`."""
    rows, b, a, d = query.shape
    sk, _, g, dv = value.shape
    query = (query * variant.scale).permute(1, 2, 0, 3).reshape(b, g, -1, d)  # [b, g, a/g * rows, d]
    scores = widened((query @ key.permute(1, 2, 3, 0)).view(b, a, rows, sk))
    if variant.cap is not None:
        scores = variant.cap * torch.tanh(scores / variant.cap)
    if variant.slopes is not None:
        distance = distances(call, first, rows, sq, sk, query.device)
        bias = variant.bias(distance, call.first_head, a)
        assert bias is not None
        scores = scores + bias.to(scores.dtype)
    hidden = hidden_keys(variant, call, first, rows, sq, sk, query.device)
    probabilities = _softmax(scores, hidden, call.sink)
    if call.dropout is not None and variant.dropout:
        kept = _kept(call, variant.dropout, first, rows, sq, sk, b, a)
        probabilities = probabilities * kept / (1.0 - variant.dropout)
    probabilities = probabilities.to(value.dtype).view(b, g, -1, sk)  # [b, g, a/g * rows, sk]
    context = probabilities @ value.transpose(0, 1).transpose(1, 2)  # [b, g, a/g * rows, dv]
    return context.view(b, a, rows, dv).permute(2, 0, 1, 3)


def _softmax(scores: Tensor, hidden: Tensor | None, sink: Tensor | None) -> Tensor:
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if sink is None:
        return scores.softmax(-1)
    extra = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, extra], -1).softmax(-1)[..., :-1]


def hidden_keys(
    variant: AttentionVariant, call: AttentionCall, first: int, rows: int, sq: int, sk: int, device: torch.device
) -> Tensor | None:
    """Which keys the queries `first` .. `first + rows` do not see: bool that broadcasts to [b, a, rows, sk]; None: all
    are seen."""
    query, key = _places(call, first, rows, sq, sk, device)
    distance = key - query  # [rows, sk] or [b, 1, rows, sk]
    hidden = None
    left, right = variant.reach
    for rule in (
        None if right is None else distance > right,
        None if left is None else distance < -left,
        None if call.cu_seqlens is None else document_of(query, call.cu_seqlens) != document_of(key, call.cu_seqlens),
        None if call.mask is None else _rows_of(call.mask, first, rows),
    ):
        if rule is not None:
            hidden = rule if hidden is None else hidden | rule
    return hidden


def distances(call: AttentionCall, first: int, rows: int, sq: int, sk: int, device: torch.device) -> Tensor:
    """Place of each key minus that of each of some queries: int64 [rows, sk] or [b, 1, rows, sk]."""
    query, key = _places(call, first, rows, sq, sk, device)
    return key - query


def _places(
    call: AttentionCall, first: int, rows: int, sq: int, sk: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Where queries and keys stand, as they broadcast to [rows, sk] or [b, 1, rows, sk]."""
    key = torch.arange(sk, device=device)  # [sk]
    if call.query_positions is None:
        return torch.arange(first, first + rows, device=device)[:, None] + (sk - sq), key  # [rows, 1]
    return call.query_positions[:, None, first : first + rows, None], key  # [b, 1, rows, 1]


def document_of(index: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Number of the packed document that a token is in."""
    return torch.bucketize(index, cu_seqlens[1:], right=True)


def _rows_of(mask: Tensor, first: int, rows: int) -> Tensor:
    return mask if mask.shape[-2] == 1 else mask[..., first : first + rows, :]


def _kept(call: AttentionCall, probability: float, first: int, rows: int, sq: int, sk: int, b: int, a: int) -> Tensor:
    assert call.dropout is not None
    queries = call.dropout.tokens.index.view(sq, b).t()  # [b, sq]
    if call.query_positions is None:
        assert sq == sk
        row_start = queries[:, :1]
    else:
        row_start = queries[:, :1] - call.query_positions[:, :1]
    keys = row_start + torch.arange(sk, device=queries.device)  # [b, sk]
    heads = torch.arange(call.first_head, call.first_head + a, device=queries.device)
    return keep_attention(call.dropout, queries[:, first : first + rows], keys, heads, probability)
