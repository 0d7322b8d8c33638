"""Memory as the system tells it."""

import gc

import torch

from megatron.training.log.memory import memory_report


def test_host_memory_grows_with_what_is_held():
    gc.collect()  # what other tests left, or some of it goes while this one counts
    before = memory_report(torch.device("cpu"))
    held = torch.ones(256 << 20, dtype=torch.uint8)
    after = memory_report(torch.device("cpu"))
    assert after.host_resident - before.host_resident > 192 << 20
    assert after.host_peak >= after.host_resident - (1 << 20)
    assert after.device_allocated is None
    assert "host peak" in str(after)
    assert held.numel() == 256 << 20
