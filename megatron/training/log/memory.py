"""Memory of a process, on its device and on the host."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.communication.peer_memory import symmetric_bytes


@dataclass(frozen=True)
class MemoryReport:
    """Memory in bytes. The device's fields are None on a CPU, where tensors are part of the host's memory."""

    host_resident: int
    host_peak: int
    device_allocated: int | None = None
    device_reserved: int | None = None
    device_peak_allocated: int | None = None
    device_peak_reserved: int | None = None
    device_allocations: int | None = None
    """Tensors alive on the device."""
    device_used: int | None = None
    """Memory of the whole device that is in use, by any process and for any purpose; None unless it is requested."""

    @property
    def peak(self) -> int:
        """Largest memory of the tensors so far: allocated on the device, or resident on the host."""
        return self.host_peak if self.device_peak_allocated is None else self.device_peak_allocated

    def __str__(self) -> str:
        text = f"memory (MB) | host: {_mb(self.host_resident)} | host peak: {_mb(self.host_peak)}"
        if self.device_allocated is not None:
            text += f" | allocated: {_mb(self.device_allocated)} | max allocated: {_mb(self.device_peak_allocated)}"
            text += f" | reserved: {_mb(self.device_reserved)} | max reserved: {_mb(self.device_peak_reserved)}"
        if self.device_used is not None:
            text += f" | device memory used: {_mb(self.device_used)}"
        return text


def memory_report(device: torch.device, *, device_used: bool = False) -> MemoryReport:
    """Returns the present and the largest memory of this process. Reads the allocator's counters and does not wait for
    the device. With `device_used` it also asks the driver for the memory in use on the whole device."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    resident = _resident_bytes() or peak
    if device.type != "cuda":
        return MemoryReport(resident, peak)
    stats = torch.cuda.memory_stats(device)
    shared = symmetric_bytes()
    free, total = torch.cuda.mem_get_info(device) if device_used else (0, 0)
    return MemoryReport(
        host_resident=resident,
        host_peak=peak,
        device_allocated=stats.get("allocated_bytes.all.current", 0) + shared,
        device_reserved=stats.get("reserved_bytes.all.current", 0) + shared,
        device_peak_allocated=stats.get("allocated_bytes.all.peak", 0) + shared,
        device_peak_reserved=stats.get("reserved_bytes.all.peak", 0) + shared,
        device_allocations=stats.get("allocation.all.current", 0),
        device_used=total - free if device_used else None,
    )


def _resident_bytes() -> int | None:
    """Returns the resident memory, None on systems other than Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * resource.getpagesize()


def _mb(count: int | None) -> str:
    return f"{(count or 0) / 2**20:.1f}"
