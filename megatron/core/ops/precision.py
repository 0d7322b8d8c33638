""" "float32" means at least float32: which type to compute in."""

import torch
from torch import Tensor


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The wider of float32 and `dtype`: norms, softmax and losses compute in it."""
    return torch.promote_types(dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    """The tensor in the wider of float32 and its own type; itself where that is no change."""
    return tensor.to(at_least_float32(tensor.dtype))
