"""Cross entropy on a GPU: one kernel reads the logits for the loss, one writes the gradient over them."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.communication.collectives import Group
from megatron.core.ops.cross_entropy import SPENT, VocabularyPart, combine, cross_entropy, vocabulary_part
from megatron.core.ops.tiles import cdiv
from megatron.core.utils.autograd_context import AutogradContext

_COLUMNS = 4096
"""Logits of one row that a program reads at once."""
_STEPS = 4
"""Number of these logits that one lane of the statistics reads."""


@triton.jit
def _statistics_kernel(  # type: ignore[no-untyped-def]
    log_sum, chosen, logits, labels, columns, first, count, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    # Each lane keeps a maximum and a sum of its own, which it rescales once for the STEPS logits that it takes at once.
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    largest = tl.full((LANES,), -float("inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for start in range(0, count, STEPS * LANES):
        at = logits + row * columns + start + offsets
        part = tl.load(at, mask=start + offsets < count, other=-float("inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(part, 0))
        safe = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        total = total * tl.exp(largest - safe) + tl.sum(tl.exp(part - safe[None, :]), 0)
        largest = new_largest
    row_largest = tl.max(largest, 0)
    safe_row_largest = tl.where(row_largest == -float("inf"), 0.0, row_largest)  # a rank may hold padding only
    row_total = tl.sum(total * tl.exp(largest - safe_row_largest), 0)
    label = tl.load(labels + row) - first
    here = (label >= 0) & (label < count)
    tl.store(log_sum + row, safe_row_largest + tl.log(row_total))
    tl.store(chosen + row, tl.load(logits + row * columns + label, mask=here, other=0.0).to(tl.float32))


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    gradient, logits, labels, log_sum, loss_gradient, columns, first, count, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    label = tl.load(labels + row)
    scale = tl.where(label >= 0, tl.load(loss_gradient + row), 0.0)
    part = tl.load(logits + row * columns + column, mask=column < count, other=-float("inf")).to(tl.float32)
    probability = tl.exp(part - tl.load(log_sum + row))
    value = (probability - tl.where((column == label - first) & (column < count), 1.0, 0.0)) * scale
    tl.store(gradient + row * columns + column, value.to(gradient.dtype.element_ty), mask=column < columns)


def cross_entropy_triton(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    *,
    label_smoothing: float = 0.0,
    overwrite_logits: bool = False,
    group: Group = None,
) -> Tensor:
    """Computes `cross_entropy.cross_entropy` with Triton kernels. Float64 and label smoothing use the reference."""
    if label_smoothing or logits.dtype is torch.float64:
        return cross_entropy(
            logits,
            labels,
            vocab_size,
            label_smoothing=label_smoothing,
            overwrite_logits=overwrite_logits,
            group=group,
        )
    part = vocabulary_part(logits.shape[-1], vocab_size, group)
    return _CrossEntropy.apply(logits, labels, part, overwrite_logits, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, logits: Tensor, labels: Tensor, part: VocabularyPart, overwrite: bool, group: Group
    ) -> Tensor:
        logits, labels = logits.contiguous(), labels.contiguous()
        rows, columns = logits.shape
        log_sum = torch.empty(rows, dtype=torch.float32, device=logits.device)
        chosen = torch.empty_like(log_sum)
        _statistics_kernel[(rows,)](
            log_sum, chosen, logits, labels, columns, part.first, part.count,
            STEPS=_STEPS, LANES=_COLUMNS // _STEPS, num_warps=4,
        )  # fmt: skip
        loss, log_sum = combine(log_sum, chosen, None, labels, part, 0.0, group)
        ctx.save_for_backward(logits, labels, log_sum)
        ctx.part, ctx.overwrite, ctx.spent = part, overwrite, False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, loss_gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.spent:
            raise RuntimeError(SPENT)
        logits, labels, log_sum = ctx.saved_tensors
        gradient = logits if ctx.overwrite else torch.empty_like(logits)
        ctx.spent = ctx.overwrite
        rows, columns = logits.shape
        _gradient_kernel[(rows, cdiv(columns, _COLUMNS))](
            gradient, logits, labels, log_sum, loss_gradient.contiguous(), columns, ctx.part.first, ctx.part.count,
            COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
        return gradient, None, None, None, None
