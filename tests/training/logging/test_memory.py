"""Memory as the system tells it."""

import torch

from megatron.training.logging.memory import memory_report


def test_host_memory_grows_with_what_is_held():
    before = memory_report(torch.device("cpu"))
    held = torch.ones(64 << 20, dtype=torch.uint8)
    after = memory_report(torch.device("cpu"))
    assert after.host_resident - before.host_resident > 48 << 20
    assert after.host_peak >= after.host_resident - (1 << 20)
    assert after.device_allocated is None
    assert "host peak" in str(after)
    assert held.numel() == 64 << 20
