"""Live bytes and their peak."""

import torch

from megatron.diagnosis.memory.allocations import Allocations


def test_live_bytes_and_their_peak() -> None:
    before = torch.empty(100, device="meta")
    with Allocations() as allocations:
        allocations.leave_out([before])
        first = before * 2  # 400 bytes, as a GPU's allocator rounds them
        assert (allocations.live, allocations.peak) == (512, 512)
        view = first[:10]
        host = torch.ones(1000)
        second = torch.cat([first, first])
        del first
        assert (allocations.live, allocations.peak) == (512 + 1024, 512 + 1024)
        del second
        assert (allocations.live, allocations.peak) == (512, 512 + 1024)
        allocations.start()
        del view
    assert (allocations.live, allocations.peak, host.numel()) == (0, 512, 1000)
