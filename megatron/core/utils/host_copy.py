"""A small tensor on its way to the host, where its numbers are needed to go on."""

import torch
from torch import Tensor


class HostCopy:
    """Begins to copy; work may be given to the device meanwhile. `wait` gives the numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._copy = tensor

    def wait(self) -> Tensor:
        """The tensor on the host, once what the device was given before the copy is done."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copy
