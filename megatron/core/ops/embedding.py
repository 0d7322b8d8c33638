"""Embedding lookup. The gradient is accumulated row by row into the table's main gradient, never as a dense table."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.communication.collectives import Group, group_rank, group_size
from megatron.core.parameters import main_grad_accumulator
from megatron.core.utils.autograd_context import AutogradContext

AccumulateRows = Callable[[Tensor, Tensor, Tensor], None]
"""A function with the signature and result of `accumulate_rows`."""


def embedding(
    index: Tensor, table: Tensor, group: Group = None, accumulate_rows: AccumulateRows | None = None
) -> Tensor:
    """Returns the rows of `table` [rows, h] that `index` (int64 [...]) names: [..., h].

    With a group the whole table is split evenly by rows in group order. Each rank returns zeros for rows of other
    ranks, so the sum over the group is the result. An index outside the whole table raises an IndexError on a CPU and a
    device assert on a GPU, on one rank only. `accumulate_rows` is the function that adds the gradient's rows to the
    table's main gradient; None: `MainGrad.add_rows`.
    """
    size = group_size(group)
    if size == 1:
        return _Embedding.apply(index, table, None, accumulate_rows)
    rank, rows = group_rank(group), table.shape[0]
    local = index - rank * rows
    on_other_rank = torch.zeros_like(index, dtype=torch.bool)
    if rank > 0:
        on_other_rank |= local < 0
    if rank < size - 1:
        on_other_rank |= local >= rows
    # An index of another rank reads some local row, and backward adds zeros to that row. The rows differ from index to
    # index, because threads that accumulate into the same row wait for each other.
    return _Embedding.apply(torch.where(on_other_rank, index % rows, local), table, on_other_rank, accumulate_rows)


def accumulate_rows(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """Adds rows[i] to row index[i] of a table: [rows, h], int64 [t], [t, h]. Indices may repeat."""
    table.index_add_(0, index, rows.to(table.dtype))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        index: Tensor,
        table: Tensor,
        on_other_rank: Tensor | None,
        accumulate: AccumulateRows | None,
    ) -> Tensor:
        ctx.save_for_backward(index, on_other_rank)
        ctx.table, ctx.accumulate = table, accumulate
        found = F.embedding(index, table)
        return found if on_other_rank is None else found.masked_fill_(on_other_rank[..., None], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        (index, on_other_rank), table = ctx.saved_tensors, ctx.table
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        if on_other_rank is not None:
            output_gradient = output_gradient.masked_fill(on_other_rank[..., None], 0.0)
        main_grad = main_grad_accumulator(table)
        if main_grad is None:
            gradient = torch.ops.aten.embedding_dense_backward(output_gradient, index, table.shape[0], -1, False)
            return None, gradient, None, None
        index, rows = index.reshape(-1), output_gradient.reshape(-1, table.shape[1])
        if ctx.accumulate is None:
            main_grad.add_rows(index, rows)
        else:
            main_grad.begin_write()
            ctx.accumulate(main_grad.gradient, index, rows)
            main_grad.end_write()
        return None, None, None, None
