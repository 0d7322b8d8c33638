"""Dropout, as a record."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from megatron.core.ops.dropout.dropout import bias_dropout_add, keep_rows
from megatron.core.ops.dropout.dropout_cpu import keep_rows_compiled
from megatron.core.ops.records import ByDevice, Ops, on_gpus, operation


@dataclass(frozen=True)
class DropoutOps(Ops):
    """Random masks, and the sum of an output, its bias and the residual. On a CPU numba draws the masks."""

    keep_rows: Callable[..., Tensor] = operation(
        ByDevice(cpu=keep_rows_compiled, cuda=keep_rows), "dropout masks", plain=keep_rows
    )
    bias_dropout_add: Callable[..., Tensor] = operation(bias_dropout_add, "dropout")

    @classmethod
    def by_triton(cls) -> Self:
        """Returns the record with our kernels for GPUs."""
        from megatron.core.ops.dropout import dropout_triton

        return on_gpus(cls(), dropout_triton)
