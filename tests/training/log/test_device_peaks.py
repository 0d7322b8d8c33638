"""Peak rates of devices."""

import torch

from megatron.training.log.device_peaks import peak_of_device_name, peak_tflops


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
