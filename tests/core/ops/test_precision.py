"""Which type is computed in."""

import pytest
import torch

from megatron.core.ops.precision import at_least_float32, widened


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_wider_type(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    tensor = torch.ones(2, dtype=dtype)
    assert at_least_float32(dtype) is wide and widened(tensor).dtype is wide
    assert (widened(tensor) is tensor) == (dtype is wide)
