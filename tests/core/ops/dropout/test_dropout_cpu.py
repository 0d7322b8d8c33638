"""Dropout masks drawn by compiled code on a CPU."""

import pytest
import torch

from megatron.core.ops.dropout.dropout import Draw, keep_rows
from megatron.core.ops.dropout.dropout_cpu import keep_rows_compiled


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("count", [1, 3, 4, 17, 64])
def test_compiled_masks_equal_the_definition(count: int, bits: int) -> None:
    draw = Draw((3123456789, 3987654321), torch.tensor(2**33 + 7), 0.37, bits)
    row = torch.arange(40) * 3 + 2**33
    first = torch.arange(40) + 5
    arguments = (draw, row, row >> 32, first, count)
    assert torch.equal(keep_rows_compiled(*arguments), keep_rows(*arguments))
