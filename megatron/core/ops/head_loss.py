"""The output layer and its loss as one operation, for all tokens at once or in chunks."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.communication.collectives import Group
from megatron.core.ops.attention.soft_cap import soft_cap
from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.ops.linear import linear
from megatron.core.parameters import main_grad_accumulator
from megatron.core.utils.autograd_context import AutogradContext


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
        return _InChunks.apply(compute, hidden, weight, bias, labels, chunk, trains_weight)
    logits = linear(
        hidden, weight, bias, group, gathers=gathers, out_dtype=out_dtype, trains_weight=trains_weight
    )  # [t, columns]
    if cap is None:
        return loss(logits, labels, vocab_size, overwrite_logits=True, group=group)
    return loss(soft_cap(logits, cap), labels, vocab_size, group=group)  # keeps the capped logits: backward reads them


class _InChunks(torch.autograd.Function):
    """Returns `compute(hidden, weight, bias, labels)` of chunks of tokens, and computes it again in backward. Each rank
    that gives a part of the tokens gives a part of each chunk.

    All chunks together are one contribution to the weight's main gradient, so that the number of contributions does not
    depend on the number of tokens.
    """

    @staticmethod
    def forward(
        ctx: AutogradContext,
        compute: Callable[..., Tensor],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        trains_weight: bool,
    ) -> Tensor:
        ctx.save_for_backward(hidden, labels)
        ctx.compute, ctx.chunk = compute, chunk
        # Keeps the parameters, not saved tensors: full sharding frees their storage until backward.
        ctx.weight, ctx.bias, ctx.trains_weight = weight, bias, trains_weight
        by_rank = _by_rank(labels, hidden)
        losses = [
            compute(hidden[rows], weight, bias, by_rank[:, rows].flatten()).view(len(by_rank), -1)
            for rows in _chunks(hidden, chunk)
        ]
        return torch.cat(losses, 1).flatten()

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, labels = ctx.saved_tensors
        _, needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        needs = (needs_hidden, needs_weight, needs_bias)
        labels, loss_gradient = _by_rank(labels, hidden), _by_rank(loss_gradient, hidden)
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        sums: list[Tensor | None] = [None, None]
        main_grad = main_grad_accumulator(ctx.weight) if needs_weight and ctx.trains_weight else None
        with contextlib.nullcontext() if main_grad is None else main_grad.counted_once(), torch.enable_grad():
            for rows in reversed(_chunks(hidden, ctx.chunk)):
                part = hidden[rows].detach().requires_grad_(needs_hidden)
                losses = ctx.compute(part, ctx.weight, ctx.bias, labels[:, rows].flatten())
                wanted = [t for t, needed in zip((part, ctx.weight, ctx.bias), needs, strict=True) if needed]
                found = iter(torch.autograd.grad(losses, wanted, loss_gradient[:, rows].flatten(), allow_unused=True))
                of_hidden, *of_parameters = (next(found) if needed else None for needed in needs)
                if hidden_gradient is not None and of_hidden is not None:
                    hidden_gradient[rows] = of_hidden
                pairs = zip(sums, of_parameters, strict=True)
                sums = [new if old is None or new is None else old + new for old, new in pairs]
        return None, hidden_gradient, *sums, None, None, None


def _chunks(hidden: Tensor, chunk: int) -> list[slice]:
    return [slice(first, first + chunk) for first in range(0, hidden.shape[0], chunk)]


def _by_rank(tokens: Tensor, hidden: Tensor) -> Tensor:
    """Returns values of all ranks' tokens [t] by the rank that has the hidden states, [ranks, t / ranks]."""
    return tokens.view(tokens.shape[0] // hidden.shape[0], -1)
