"""The clock and the rates."""

import torch

from megatron.training.log.throughput import StepClock, peak_of_device_name, peak_tflops, speed


def test_clock_leaves_pauses_out():
    time = [100.0]
    clock = StepClock(lambda: time[0])
    time[0] = 103.0
    assert clock.seconds() == 3.0
    with clock.paused():
        time[0] = 110.0
        assert clock.seconds() == 3.0
    time[0] = 111.0
    assert clock.seconds() == 4.0
    with clock.paused():
        time[0] = 120.0
        clock.restart()
        time[0] = 130.0
    time[0] = 132.0
    assert clock.seconds() == 2.0


def test_rates():
    rates = speed(2.0, 4, tokens=1000, flops=8e15, world_size=2, peak_tflops=4000.0)
    assert rates.seconds_per_iteration == 0.5
    assert rates.tokens_per_second == 500.0
    assert rates.tflops_per_device == 2000.0
    assert rates.mfu == 0.5
    unknown = speed(2.0, 4, flops=8e15)
    assert (unknown.mfu, unknown.tokens_per_second, unknown.tflops_per_device) == (None, None, 4000.0)
    assert speed(0.0, 0, tokens=1, flops=1.0).tokens_per_second is None


def test_peaks_are_dense_and_unknown_devices_have_none():
    bf16 = torch.bfloat16
    assert peak_of_device_name("NVIDIA H200", bf16) == 989.4
    assert peak_of_device_name("NVIDIA H100 80GB HBM3", torch.float16) == 989.4
    assert peak_of_device_name("NVIDIA H100 PCIe", bf16) == 756.5
    assert peak_of_device_name("NVIDIA H100 NVL", bf16) == 835.5
    assert peak_of_device_name("NVIDIA A100-SXM4-80GB", bf16) == 312.0
    assert peak_of_device_name("NVIDIA GB200", bf16) == 2500.0
    assert peak_of_device_name("NVIDIA H200", bf16, fp8=True) == 1978.9
    assert peak_of_device_name("NVIDIA A100-SXM4-80GB", bf16, fp8=True) is None
    assert peak_of_device_name("NVIDIA H200", torch.float32) is None
    assert peak_of_device_name("NVIDIA H100 80GB HBM3 MIG 1g.10gb", bf16) is None
    assert peak_of_device_name("NVIDIA RTX A3000", bf16) is None
    assert peak_of_device_name("NVIDIA A100X Prototype", bf16) is None
    assert peak_tflops(torch.device("cpu"), bf16) is None
