"""The type to compute in where the code says float32: float32, or the model's type if that is wider."""

import torch
from torch import Tensor


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Returns the wider of float32 and `dtype`. Norms, softmax and losses compute in it."""
    return torch.promote_types(dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    """Returns the tensor in the wider of float32 and its own type: the same object if it has that type already."""
    return tensor.to(at_least_float32(tensor.dtype))
