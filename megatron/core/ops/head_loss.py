"""The output layer and its loss as one operation, for all tokens at once or in chunks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
    out_dtype: torch.dtype | None = None,
    trains_weight: bool = True,
    chunk: int | None = None,
) -> Tensor:
    """Returns the loss of each token: hidden [t, h], weight [columns, h], bias [columns] and labels (int64 [t]) -> [t].

    The logits have the type of `hidden`, or `out_dtype`; the loss has the wider of float32 and that type. Columns from
    `vocab_size` on are padding. Backward writes the gradient over the logits. `cap` bounds the logits (`soft_cap`).
    `loss` is `cross_entropy` or a faster implementation of it.

    With a group the vocabulary is split evenly. With `gathers` each rank has its part of `hidden` ([t / ranks, h]),
    while all ranks have the labels and losses of all tokens. `out_dtype` and `trains_weight` are those of `linear`.

    With `chunk` the logits of this many tokens of `hidden` exist at a time, and backward computes them again.
    """
    if chunk is not None and hidden.shape[0] > chunk:
        more: dict[str, Any] = {
            "cap": cap,
            "loss": loss,
            "out_dtype": out_dtype,
            "trains_weight": trains_weight,
            "gathers": gathers,
        }
        compute = functools.partial(head_loss, vocab_size=vocab_size, group=group, **more)
        return _in_chunks(compute, hidden, weight, bias, labels, chunk)
    logits = linear(
        hidden, weight, bias, group, gathers=gathers, out_dtype=out_dtype, trains_weight=trains_weight
    )  # [t, columns]
    if cap is None:
        return loss(logits, labels, vocab_size, overwrite_logits=True, group=group)
    return loss(soft_cap(logits, cap), labels, vocab_size, group=group)  # keeps the capped logits: backward reads them


def _in_chunks(
    compute: Callable[..., Tensor], hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int
) -> Tensor:
    """Returns `compute(hidden, weight, bias, labels)` of chunks of tokens. Each rank that gives a part of the tokens
    gives a part of each chunk."""
    ranks = labels.shape[0] // hidden.shape[0]
    by_rank, losses = labels.view(ranks, -1), []
    for first in range(0, hidden.shape[0], chunk):
        rows = slice(first, first + chunk)
        arguments = hidden[rows], weight, bias, by_rank[:, rows].flatten()
        found = checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False)
        losses.append(found.view(ranks, -1))
    return torch.cat(losses, 1).flatten()
