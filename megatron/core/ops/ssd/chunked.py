"""The state space recurrence of Mamba-2 in chunks, as matrix products (Dao and Gu 2024, arXiv:2405.21060, 6)."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.decays import sums_between
from megatron.core.ops.precision import widened
from megatron.core.utils.autograd_context import AutogradContext

CHUNK = 128
"""Tokens of a chunk. It changes the order of sums, not the function."""


def ssd(
    x: Tensor,
    step: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
    document: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
    *,
    states_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns what `ops.ssd.recurrent.ssd_recurrent` returns, for the same arguments.

    Inside a chunk a token reads the tokens before it as attention does, with the weights C_t . B_j step_j exp(sum of
    the decays between them). The state at the end of a chunk goes to the next one. Takes s * chunk * h numbers of
    memory for these weights.

    With `states_dtype` the states before each chunk are rounded to this type, in which they are kept for backward. They
    still pass from chunk to chunk in float32 at least.
    """
    length, batch, heads, width = x.shape
    groups, chunk = b.shape[2], min(chunk, length)
    count, shared = -(-length // chunk), heads // groups

    def in_chunks(tensor: Tensor, *dims: int) -> Tensor:
        """[s, b, ...] -> [chunks, chunk, b, *dims], with zeros after the last token: a step of 0 changes no state."""
        padded = F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, count * chunk - length))
        return padded.view(count, chunk, batch, *dims)

    wide = widened(x)
    step = step.to(wide.dtype)
    values = in_chunks(wide * step[..., None], groups, shared, width).permute(0, 2, 3, 4, 1, 5)  # [z, b, g, r, l, p]
    b = in_chunks(widened(b), groups, -1).permute(0, 2, 3, 1, 4)  # [z, b, g, l, n]
    c = in_chunks(widened(c), groups, -1).permute(0, 2, 3, 1, 4)
    decays = in_chunks(step * rate.to(step.dtype), groups, shared).permute(0, 2, 3, 4, 1)  # logarithms, [z, b, g, r, l]
    same, same_as_before = _document_masks(document, count, chunk, x.device)

    between = sums_between(decays).masked_fill(~same, -torch.inf).exp()  # [z, b, g, r, l, l]
    output = ((c @ b.transpose(-1, -2))[:, :, :, None] * between) @ values
    to_end = between[..., -1, :, None]
    added = b.transpose(-1, -2)[:, :, :, None] @ (values * to_end)  # [z, b, g, r, n, p]
    until = decays.cumsum(-1)
    from_start = until.exp() * same_as_before
    kept = from_start[..., -1, None, None]
    carried = torch.zeros_like(added[0]) if state is None else state.to(added.dtype).view_as(added[0])
    if states_dtype is None:
        before = []
        for index in range(count):
            before.append(carried)
            carried = kept[index] * carried + added[index]
        read = c[:, :, :, None] @ torch.stack(before)
    else:
        read, carried = _ReadRoundedStates.apply(c[:, :, :, None], kept, added, carried, states_dtype)
    output = output + from_start[..., None] * read
    rows = output.permute(0, 4, 1, 2, 3, 5).reshape(count * chunk, batch, heads, width)
    return rows[:length].to(x.dtype), carried.flatten(1, 2)


class _ReadRoundedStates(torch.autograd.Function):
    """C @ (states before each chunk, rounded), and the states after the last chunk. Keeps the rounded states."""

    @staticmethod
    def forward(
        ctx: AutogradContext, c: Tensor, kept: Tensor, added: Tensor, carried: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        before = torch.empty(added.shape, dtype=dtype, device=added.device)
        for index in range(added.shape[0]):
            before[index] = carried
            carried = kept[index] * carried + added[index]
        ctx.save_for_backward(c, kept, before)
        return c @ before.to(c.dtype), carried

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, read: Tensor, carried: Tensor) -> tuple[Tensor | None, ...]:
        c, kept, before = ctx.saved_tensors
        of_kept, of_added = torch.empty_like(kept), carried.new_empty(before.shape)
        for index in reversed(range(before.shape[0])):
            of_added[index] = carried
            of_kept[index] = (carried * before[index]).sum((-2, -1), keepdim=True)
            read_here = (c[index].transpose(-1, -2) @ read[index]).expand_as(carried)
            carried = kept[index] * carried + read_here
        # C is that of a group, which the group's heads share.
        return (read @ before.to(c.dtype).transpose(-1, -2)).sum(3, keepdim=True), of_kept, of_added, carried, None


def _document_masks(document: Tensor | None, count: int, chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns what a token may read: bool [chunks or 1, 1, 1, 1, l, l], True where it may read an earlier token of its
    chunk or itself; and whether it belongs to the document of the last token of the chunk before, [chunks or 1, 1, 1,
    1, l or 1]."""
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril()[None, None, None, None]
    if document is None:
        return causal, torch.ones(1, 1, 1, 1, 1, dtype=torch.bool, device=device)
    numbers = torch.cat([document, document[-1:].expand(count * chunk - document.shape[0])]).view(count, chunk)
    same = numbers[:, :, None] == numbers[:, None, :]
    before = torch.cat([numbers[:1, :1], numbers[:-1, -1:]])  # the first state is that of the first document
    return causal & same[:, None, None, None], (numbers == before)[:, None, None, None]
