"""Cross entropy of each token from its logits, without a float32 copy of the logits.

Statistics are computed in the wider of float32 and the logits' type, a bounded number of rows at a time; what is kept
for backward is the logits themselves and one number a token.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.precision import at_least_float32

_LOGITS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Logits that are widened at once: few on a CPU, for its caches; many on a GPU, for the sake of few launches."""

SPENT = "backward ran before and left its gradient where the logits were; run forward again"


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    *,
    label_smoothing: float = 0.0,
    overwrite_logits: bool = False,
) -> Tensor:
    """-log softmax(logits)[label]: [t, columns] and int64 [t] -> [t], in the wider of float32 and the logits' type.

    Columns from `vocab_size` on are padding: they take no part and get no gradient. A negative label marks a token
    without a loss: zero, and no gradient. Labels beyond the vocabulary are an error of the caller (an index error on a
    CPU, a device assert on a GPU). With smoothing e: (1 - e) of the label's term plus e times the mean over the
    vocabulary. `overwrite_logits` lets backward put the gradient where the logits were; the caller may then not use
    them again, and backward runs once.
    """
    return _CrossEntropy.apply(logits, labels, vocab_size or logits.shape[-1], label_smoothing, overwrite_logits)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, label_smoothing: float, overwrite: bool
    ) -> Tensor:
        wide = at_least_float32(logits.dtype)
        log_sum = torch.empty(logits.shape[0], dtype=wide, device=logits.device)
        smooth = torch.zeros_like(log_sum)
        for rows in _row_blocks(logits):
            part = logits[rows, :vocab_size].to(wide)
            torch.logsumexp(part, dim=-1, out=log_sum[rows])
            if label_smoothing:
                torch.mean(part, dim=-1, out=smooth[rows])
        counted = labels >= 0
        chosen = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0].to(wide)
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.vocab_size, ctx.label_smoothing, ctx.overwrite, ctx.spent = vocab_size, label_smoothing, overwrite, False
        loss = log_sum - (1.0 - label_smoothing) * chosen - label_smoothing * smooth
        return torch.where(counted, loss, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.spent:
            raise RuntimeError(SPENT)
        logits, labels, log_sum = ctx.saved_tensors
        gradient = logits if ctx.overwrite else torch.empty_like(logits)
        ctx.spent = ctx.overwrite
        scale = torch.where(labels >= 0, loss_gradient, 0.0)[:, None]  # [t, 1]
        label = labels.clamp(min=0)[:, None]
        for rows in _row_blocks(logits):
            part = torch.exp(logits[rows, : ctx.vocab_size].to(log_sum.dtype) - log_sum[rows, None])
            part.scatter_add_(-1, label[rows], part.new_full((part.shape[0], 1), ctx.label_smoothing - 1.0))
            if ctx.label_smoothing:
                part -= ctx.label_smoothing / ctx.vocab_size
            gradient[rows, : ctx.vocab_size] = part.mul_(scale[rows])
        gradient[:, ctx.vocab_size :] = 0.0
        return gradient, None, None, None, None


def _row_blocks(logits: Tensor) -> list[slice]:
    count = max(1, _LOGITS_AT_ONCE["cuda" if logits.is_cuda else "cpu"] // logits.shape[-1])
    return [slice(first, first + count) for first in range(0, logits.shape[0], count)]
