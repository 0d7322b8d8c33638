"""Copies of small host tensors to the device that the host does not wait for."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a host tensor on the device. A copy from ordinary host memory would let the host wait until the GPU has
    finished all that it was given before; a copy from pinned memory does not."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
