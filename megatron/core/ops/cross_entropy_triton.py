"""Cross entropy on a GPU: one pass over the logits for the loss, one that leaves the gradient in their place."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.cross_entropy import SPENT, cross_entropy

_COLUMNS = 4096
"""Logits that a program reads at once."""


@triton.jit
def _loss_kernel(  # type: ignore[no-untyped-def]
    loss, log_sum, logits, labels, columns, vocab_size, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, COLUMNS)
    largest = tl.full((COLUMNS,), -float("inf"), tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, vocab_size, COLUMNS):
        inside = start + offsets < vocab_size
        part = tl.load(logits + row * columns + start + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        new_largest = tl.maximum(largest, part)
        safe = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        total = total * tl.exp(largest - safe) + tl.exp(part - safe)
        largest = new_largest
    row_largest = tl.max(largest, 0)
    row_total = tl.sum(total * tl.exp(largest - row_largest), 0)
    row_log_sum = row_largest + tl.log(row_total)
    label = tl.load(labels + row)
    known = (label >= 0) & (label < vocab_size)
    chosen = tl.load(logits + row * columns + label, mask=known, other=float("nan")).to(tl.float32)
    tl.store(log_sum + row, row_log_sum)
    tl.store(loss + row, tl.where(label >= 0, row_log_sum - chosen, 0.0))


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    gradient, logits, labels, log_sum, loss_gradient, columns, vocab_size, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    label = tl.load(labels + row)
    scale = tl.where(label >= 0, tl.load(loss_gradient + row), 0.0)
    part = tl.load(logits + row * columns + column, mask=column < vocab_size, other=-float("inf")).to(tl.float32)
    value = (tl.exp(part - tl.load(log_sum + row)) - tl.where(column == label, 1.0, 0.0)) * scale
    tl.store(gradient + row * columns + column, value.to(gradient.dtype.element_ty), mask=column < columns)


def cross_entropy_triton(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    *,
    label_smoothing: float = 0.0,
    overwrite_logits: bool = False,
) -> Tensor:
    """As `cross_entropy.cross_entropy`, which it leaves to it in float64 and with label smoothing. The loss of a label
    beyond the vocabulary is NaN."""
    if label_smoothing or logits.dtype is torch.float64:
        return cross_entropy(
            logits, labels, vocab_size, label_smoothing=label_smoothing, overwrite_logits=overwrite_logits
        )
    return _CrossEntropy.apply(logits, labels, vocab_size or logits.shape[-1], overwrite_logits)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, overwrite: bool) -> Tensor:
        logits, labels = logits.contiguous(), labels.contiguous()
        rows, columns = logits.shape
        loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
        log_sum = torch.empty_like(loss)
        _loss_kernel[(rows,)](loss, log_sum, logits, labels, columns, vocab_size, COLUMNS=_COLUMNS, num_warps=8)
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.vocab_size, ctx.overwrite, ctx.spent = vocab_size, overwrite, False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.spent:
            raise RuntimeError(SPENT)
        logits, labels, log_sum = ctx.saved_tensors
        gradient = logits if ctx.overwrite else torch.empty_like(logits)
        ctx.spent = ctx.overwrite
        rows, columns = logits.shape
        _gradient_kernel[(rows, triton.cdiv(columns, _COLUMNS))](
            gradient, logits, labels, log_sum, loss_gradient.contiguous(), columns, ctx.vocab_size,
            COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
        return gradient, None, None, None
