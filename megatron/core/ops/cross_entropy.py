"""Cross entropy of each token from its logits, without a float32 copy of the logits.

Statistics are computed in the wider of float32 and the logits' type, a bounded number of rows at a time. Backward keeps
the logits and one number per token. If the vocabulary is split over a group of ranks, forward gathers two or three
numbers per token over the group; backward communicates nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.communication.collectives import Group, gather_rows, group_rank, group_size
from megatron.core.ops.precision import at_least_float32
from megatron.core.utils.autograd_context import AutogradContext

_LOGITS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Number of logits converted to the wider type at once: few on a CPU, to stay in its caches; many on a GPU, to launch
few kernels."""

SPENT = "backward ran before and left its gradient where the logits were; run forward again"


@dataclass(frozen=True)
class VocabularyPart:
    """The columns of the whole vocabulary that a rank's logits cover."""

    first: int
    """Index of the first column in the whole vocabulary."""
    count: int
    """Number of columns that are not padding; these come first."""
    vocab_size: int
    """Number of columns of all ranks that are not padding."""

    def local(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the labels as columns of this part (int64 [t], 0 if outside), and whether they are inside (bool
        [t])."""
        column = labels - self.first
        here = (column >= 0) & (column < self.count)
        return torch.where(here, column, 0), here


def vocabulary_part(columns: int, vocab_size: int | None, group: Group) -> VocabularyPart:
    """Returns this rank's part of a vocabulary that is split evenly over a group, `columns` per rank, and padded beyond
    `vocab_size`."""
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
    """Returns -log softmax(logits)[label]: [t, columns] and int64 [t] -> [t], in the wider of float32 and the logits'
    type.

    Columns from `vocab_size` on are padding: they do not count and get no gradient. A token with a negative label has
    loss zero and no gradient. A label beyond the vocabulary has loss NaN. With label smoothing e the loss is (1 - e)
    times the label's term plus e times the mean over the vocabulary. `overwrite_logits` lets backward write the
    gradient into the logits' memory: the caller must not use the logits again, and backward can run only once.

    With a group the vocabulary is split evenly: each rank has `columns` of it, in group order. All ranks have the same
    labels, the same losses and the same gradients of losses.
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
    """Returns losses [t] and log-sums over the whole vocabulary [t].

    Each rank gives the log-sum of its columns, the label's logit (0 if the label is not in its part), and the sum of
    its logits divided by the vocabulary size.
    """
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
        ctx: AutogradContext,
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
    def backward(ctx: AutogradContext, loss_gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
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
