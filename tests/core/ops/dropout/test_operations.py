"""The record of dropout: numba draws masks on a CPU, with either record."""

from megatron.core.ops.dropout import dropout_triton
from megatron.core.ops.dropout.dropout import bias_dropout_add, keep_rows
from megatron.core.ops.dropout.dropout_cpu import keep_rows_compiled
from megatron.core.ops.dropout.operations import DropoutOps
from megatron.core.ops.records import ByDevice


def test_each_device_has_its_kernels() -> None:
    assert DropoutOps() == DropoutOps(
        keep_rows=ByDevice(keep_rows_compiled, keep_rows), bias_dropout_add=bias_dropout_add
    )
    assert DropoutOps.by_triton() == DropoutOps(
        keep_rows=ByDevice(keep_rows_compiled, dropout_triton.keep_rows_triton),
        bias_dropout_add=ByDevice(bias_dropout_add, dropout_triton.bias_dropout_add_triton),
    )
