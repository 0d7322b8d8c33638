"""Rows of a table by index, whose gradient goes to the table's sink row by row, never as a dense table."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.parameters import gradient_sink


def embedding(index: Tensor, table: Tensor) -> Tensor:
    """int64 [...] and [rows, h] -> [..., h]."""
    return _Embedding.apply(index, table)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.table = table
        return F.embedding(index, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[None, Tensor | None]:
        (index,), table = ctx.saved_tensors, ctx.table
        if not ctx.needs_input_grad[1]:
            return None, None
        sink = gradient_sink(table)
        if sink is None:
            gradient = torch.ops.aten.embedding_dense_backward(output_gradient, index, table.shape[0], -1, False)
            return None, gradient
        sink.add_rows(index.reshape(-1), output_gradient.reshape(-1, table.shape[1]))
        return None, None
