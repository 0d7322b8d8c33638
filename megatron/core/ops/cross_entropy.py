"""Cross entropy of each token from its logits, without a float32 copy of the logits.

Statistics are computed in the wider of float32 and the logits' type, a bounded number of rows at a time; what is kept
for backward is the logits themselves and one number a token. Where the vocabulary is cut over a group of ranks, they
tell each other two or three numbers a token, in forward only.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.collectives import Group, gather_rows, group_rank, group_size
from megatron.core.ops.precision import at_least_float32

_LOGITS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Logits that are widened at once: few on a CPU, for its caches; many on a GPU, for the sake of few launches."""

SPENT = "backward ran before and left its gradient where the logits were; run forward again"


@dataclass(frozen=True)
class VocabularyPart:
    """Which columns of the whole vocabulary a rank's logits are."""

    first: int
    """Number of its first column in the whole vocabulary."""
    count: int
    """Its columns that are no padding; they come first."""
    vocab_size: int
    """Columns of all ranks that are no padding."""

    def local(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Labels as columns of this part, int64 [t], 0 where they are not in it; and whether they are, bool [t]."""
        column = labels - self.first
        here = (column >= 0) & (column < self.count)
        return torch.where(here, column, 0), here


def vocabulary_part(columns: int, vocab_size: int | None, group: Group) -> VocabularyPart:
    """The part of a vocabulary that is cut evenly over a group, `columns` to a rank, and padded beyond `vocab_size`."""
    first = columns * group_rank(group)
    vocab_size = vocab_size or columns * group_size(group)
    return VocabularyPart(first, min(max(vocab_size - first, 0), columns), vocab_size)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    *,
    label_smoothing: float = 0.0,
    overwrite_logits: bool = False,
    group: Group = None,
) -> Tensor:
    """-log softmax(logits)[label]: [t, columns] and int64 [t] -> [t], in the wider of float32 and the logits' type.

    Columns from `vocab_size` on are padding: they take no part and get no gradient. A negative label marks a token
    without a loss: zero, and no gradient. The loss of a label beyond the vocabulary is NaN. With smoothing e: (1 - e)
    of the label's term plus e times the mean over the vocabulary. `overwrite_logits` lets backward put the gradient
    where the logits were; the caller may then not use them again, and backward runs once.

    Over a group the vocabulary is cut evenly: each rank has `columns` of it, in group order, and all have the same
    labels, losses, and gradients of losses.
    """
    part = vocabulary_part(logits.shape[-1], vocab_size, group)
    return _CrossEntropy.apply(logits, labels, part, label_smoothing, overwrite_logits, group)


def combine(
    log_sum: Tensor,
    chosen: Tensor,
    mean: Tensor | None,
    labels: Tensor,
    part: VocabularyPart,
    smoothing: float,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """Losses and whole log-sums [t] from each rank's: log-sum of its columns, logit of the label if it has it (else
    0), and mean over the vocabulary of the logits that it has."""
    if group_size(group) > 1:
        own = torch.stack([log_sum, chosen] if mean is None else [log_sum, chosen, mean])
        log_sums, *sums = gather_rows(own[None], group).unbind(1)  # [ranks, t] each
        log_sum = torch.logsumexp(log_sums, 0)
        chosen, mean = sums[0].sum(0), None if mean is None else sums[1].sum(0)
    loss = log_sum - (1.0 - smoothing) * chosen
    if mean is not None:
        loss = loss - smoothing * mean
    loss = torch.where(labels >= part.vocab_size, torch.nan, loss)
    return torch.where(labels >= 0, loss, 0.0), log_sum


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        part: VocabularyPart,
        label_smoothing: float,
        overwrite: bool,
        group: Group,
    ) -> Tensor:
        wide = at_least_float32(logits.dtype)
        log_sum = torch.empty(logits.shape[0], dtype=wide, device=logits.device)
        mean = torch.empty_like(log_sum) if label_smoothing else None
        for rows in _row_blocks(logits):
            block = logits[rows, : part.count].to(wide)
            torch.logsumexp(block, dim=-1, out=log_sum[rows])
            if mean is not None:
                torch.sum(block, dim=-1, out=mean[rows]).div_(part.vocab_size)
        label, here = part.local(labels)
        chosen = torch.where(here, logits.gather(-1, label[:, None])[:, 0].to(wide), 0.0)
        loss, log_sum = combine(log_sum, chosen, mean, labels, part, label_smoothing, group)
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.part, ctx.label_smoothing, ctx.overwrite, ctx.spent = part, label_smoothing, overwrite, False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        if ctx.spent:
            raise RuntimeError(SPENT)
        (logits, labels, log_sum), part = ctx.saved_tensors, ctx.part
        gradient = logits if ctx.overwrite else torch.empty_like(logits)
        ctx.spent = ctx.overwrite
        scale = torch.where(labels >= 0, loss_gradient, 0.0)[:, None]  # [t, 1]
        label, here = part.local(labels)
        of_label = (here.to(log_sum.dtype) * (ctx.label_smoothing - 1.0))[:, None]
        for rows in _row_blocks(logits):
            block = torch.exp(logits[rows, : part.count].to(log_sum.dtype) - log_sum[rows, None])
            if part.count:
                block.scatter_add_(-1, label[rows, None], of_label[rows])
            if ctx.label_smoothing:
                block -= ctx.label_smoothing / part.vocab_size
            gradient[rows, : part.count] = block.mul_(scale[rows])
        gradient[:, part.count :] = 0.0
        return gradient, None, None, None, None, None


def _row_blocks(logits: Tensor) -> list[slice]:
    count = max(1, _LOGITS_AT_ONCE["cuda" if logits.is_cuda else "cpu"] // logits.shape[-1])
    return [slice(first, first + count) for first in range(0, logits.shape[0], count)]
