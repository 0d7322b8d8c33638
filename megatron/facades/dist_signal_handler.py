"""Megatron-LM's signal handler, for scripts with their own training loop; the app uses launch.signals."""

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.communication.collectives import all_gather


class DistributedSignalHandler:
    """Context manager for the main thread: remembers that a signal came, instead of ending the process."""

    def __init__(self, sig: int = signal.SIGTERM) -> None:
        self.sig = sig
        self._received = False
        self._previous: Any = None

    @property
    def received(self) -> int | None:
        """Number of the signal if it came on this rank, else None."""
        return int(self.sig) if self._received else None

    def __enter__(self) -> "DistributedSignalHandler":
        self._received = False
        self._previous = signal.signal(self.sig, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def signals_received(self) -> list[bool]:
        """Returns for each rank whether the signal came there. All ranks call it together."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [self._received]
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        own = torch.tensor([self._received], dtype=torch.int32, device=device)
        return [bool(one) for one in all_gather(own, dist.group.WORLD)]

    def release(self) -> bool:
        """Restores the handling of the signal from before `__enter__`. Returns False if it was restored before."""
        if self._previous is None:
            return False
        signal.signal(self.sig, self._previous)
        self._previous = None
        return True
