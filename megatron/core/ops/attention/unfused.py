"""Unfused scaled dot-product attention, for every feature, device and type: the reference of the fused kernels.

Queries are processed in blocks, so no [b, heads, s, s] tensor is ever kept. With more than one block, backward computes
the probabilities again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.core.ops.dropout.dropout import DropoutRngPosition, keep_attention
from megatron.core.ops.precision import widened

SCORES_AT_ONCE = 1 << 25
"""Largest number of attention scores of one block of queries."""


@dataclass(frozen=True)
class AttentionVariant:
    """The settings of an attention layer. They are equal for all calls of the layer."""

    scale: float
    """Factor of the scores."""
    causal: bool
    """If true, query i sees keys up to i + (sk - sq)."""
    window: tuple[int, int] | None = None
    """Query i sees keys from i + (sk - sq) - left to i + (sk - sq) + right; -1: no limit."""
    dropout: float = 0.0
    """Probability of dropping a softmax probability in training."""
    sink: bool = False
    """If true, the softmax's denominator has one more logit per head."""
    widths: tuple[int, int] | None = None
    """Channels of a query or key head, and of a value head; None: unknown, so nothing is said about padding."""
    cap: float | None = None
    """Soft cap c of the scaled scores: c tanh(score / c)."""
    slopes: tuple[float, ...] | None = None
    """ALiBi slope of each head of the whole model: the score falls by it per token of distance."""
    padded: bool = False
    """If true, calls may have a mask that hides padding."""
    chunk: int | None = None
    """Tokens of a chunk; queries see only keys of their own chunk. The call's `cu_seqlens` gives the chunks'
    boundaries, like those of documents."""
    adds_bias: bool = False
    """The call's `bias` is added to the scores."""
    selects: bool = False
    """Calls have masks that select keys for each query, the same for all heads."""

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Number of keys a query sees to its left and to its right, with causality; None: all."""
        left, right = (None if edge < 0 else edge for edge in self.window or (-1, -1))
        if self.chunk is not None:
            left, right = (self.chunk - 1 if edge is None else min(edge, self.chunk - 1) for edge in (left, right))
        return left, 0 if self.causal else right

    def bias(self, distance: Tensor, first_head: int, heads: int) -> Tensor | None:
        """Returns what ALiBi adds to the scores of some heads (Press et al. 2022), or None without ALiBi.

        Distances (key minus query) that broadcast to [b, heads, rows, sk] -> float64 of that shape.
        """
        if self.slopes is None:
            return None
        slopes = torch.tensor(self.slopes[first_head : first_head + heads], dtype=torch.float64, device=distance.device)
        return slopes[:, None, None] * -distance.abs()


@dataclass(frozen=True)
class AttentionCall:
    """The arguments that differ between calls of a layer."""

    query_positions: Tensor | None = None
    """int64 [b, sq]: position of each query among the keys; None: the queries are the last sq keys."""
    mask: Tensor | None = None
    """bool, broadcasts to [b, heads, sq, sk]; True hides the key, in addition to what the variant hides."""
    cu_seqlens: Tensor | None = None
    """Boundaries of packed documents (b = 1): queries see keys of their own document only."""
    max_seqlen: int | None = None
    """Length of the longest packed document."""
    sink: Tensor | None = None
    """The sink's logit of each head."""
    dropout: DropoutRngPosition | None = None
    """None: nothing is dropped."""
    first_head: int = 0
    """Index of this rank's first head, counted over the whole model; dropout masks depend on it."""
    bias: Tensor | None = None
    """With `adds_bias`: added to the scaled scores; broadcasts to [b, heads, sq, sk]."""
    key_start: Tensor | None = None
    """With `dropout`, if the keys are another sequence than the queries: global index of the first key of each row,
    int64 [b]."""


def attention(query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, call: AttentionCall) -> Tensor:
    """Returns softmax(scale q k^T) v: query [sq, b, a, d], key [sk, b, g, d], value [sk, b, g, dv] -> [sq, b, a, dv].

    Each of the g key heads serves a/g consecutive query heads. The softmax is computed in the wider of float32 and the
    inputs' type. A query that sees no key averages over all of them.
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
            preserve_rng_state=False,  # masks are functions of a token's position
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
    """Computes attention of a block of queries; the first one has index `first`."""
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
    if call.bias is not None:
        scores = scores + _rows_of(call.bias, first, rows).to(scores.dtype)
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
    """Returns which keys the queries `first` .. `first + rows` do not see: bool that broadcasts to [b, a, rows, sk];
    None if they see all."""
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
    """Returns the position of each key minus that of each query: int64 [rows, sk] or [b, 1, rows, sk]."""
    query, key = _places(call, first, rows, sq, sk, device)
    return key - query


def _places(
    call: AttentionCall, first: int, rows: int, sq: int, sk: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns the positions of queries and of keys, which broadcast to [rows, sk] or [b, 1, rows, sk]."""
    key = torch.arange(sk, device=device)  # [sk]
    if call.query_positions is None:
        return torch.arange(first, first + rows, device=device)[:, None] + (sk - sq), key  # [rows, 1]
    return call.query_positions[:, None, first : first + rows, None], key  # [b, 1, rows, 1]


def document_of(index: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns the index of the packed document that contains each token."""
    return torch.bucketize(index, cu_seqlens[1:], right=True)


def _rows_of(mask: Tensor, first: int, rows: int) -> Tensor:
    return mask if mask.shape[-2] == 1 else mask[..., first : first + rows, :]


def _kept(call: AttentionCall, probability: float, first: int, rows: int, sq: int, sk: int, b: int, a: int) -> Tensor:
    assert call.dropout is not None
    queries = call.dropout.tokens.index.view(sq, b).t()  # [b, sq]
    if call.key_start is not None:
        row_start = call.key_start[:, None]
    elif call.query_positions is None:
        assert sq == sk
        row_start = queries[:, :1]
    else:
        row_start = queries[:, :1] - call.query_positions[:, :1]
    keys = row_start + torch.arange(sk, device=queries.device)  # [b, sk]
    heads = torch.arange(call.first_head, call.first_head + a, device=queries.device)
    return keep_attention(call.dropout, queries[:, first : first + rows], keys, heads, probability)
