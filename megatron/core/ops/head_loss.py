"""The head and its loss as one operation, so that a backend may run them in chunks of tokens."""

from collections.abc import Callable

from torch import Tensor

from megatron.core.collectives import Group
from megatron.core.ops.attention.soft_cap import soft_cap
from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.ops.linear import linear


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    vocab_size: int,
    group: Group = None,
    *,
    gathers: bool = False,
    cap: float | None = None,
    loss: Callable[..., Tensor] = cross_entropy,
) -> Tensor:
    """Loss of each token: [t, h], head [columns, h] (+ [columns]) and int64 [t] -> [t], in the wider of float32 and
    the type of `hidden`. Columns from `vocab_size` on are padding. The gradient takes the place of the logits. `cap`
    bounds the logits: see `soft_cap`.

    Over a group the vocabulary is cut evenly; with `gathers` each rank has its part of `hidden` ([t / ranks, h]), and
    all have the labels and losses of all tokens. `loss` is `cross_entropy` or a faster implementation of it."""
    logits = linear(hidden, weight, bias, group, gathers=gathers)
    if cap is None:
        return loss(logits, labels, vocab_size, overwrite_logits=True, group=group)
    return loss(soft_cap(logits, cap), labels, vocab_size, group=group)  # backward reads the capped logits again
