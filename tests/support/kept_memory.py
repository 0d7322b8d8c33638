"""Measures the memory that a forward pass keeps for backward."""

import gc
from collections.abc import Callable

from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """Returns the bytes still allocated on the CPU after a forward pass. Measures the second of two passes."""
    forward()
    gc.disable()  # so that nothing from before is freed in between; to collect it takes half a second
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss = forward()
    finally:
        gc.enable()
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in profiler.events())
