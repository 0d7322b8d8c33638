"""--log-energy: what is counted, and what is said where nothing can be."""

import ctypes
import math

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.training.log.energy import EnergyMeter, energy_counter, make_energy_meter

CPU = torch.device("cpu")


def test_energy_without_pauses():
    joules = [100.0]
    meter = EnergyMeter(CPU, lambda: joules[0])
    joules[0] = 130.0
    assert meter.joules_per_gpu() == 30.0
    with meter.paused():
        joules[0] = 1000.0
    joules[0] += 5.0
    assert meter.joules_per_gpu() == 35.0
    meter.restart()
    assert meter.joules_per_gpu() == 0.0


def test_unknown_energy_is_said_once(capsys, monkeypatch):
    meter = EnergyMeter(CPU, lambda: math.nan, notes=True)
    assert (meter.joules_per_gpu(), meter.joules_per_gpu()) == (None, None)
    assert capsys.readouterr().out == (
        "--log-energy: the energy of the GPUs of ranks [0] is not known; the log shows no energy\n"
    )
    monkeypatch.setattr("megatron.training.log.energy.numbers_of_ranks", lambda here: [[2.0], [math.nan], [4.0]])
    assert EnergyMeter(CPU, lambda: 0.0, notes=True).joules_per_gpu() == 3.0
    assert "ranks [1] is not known; the log shows the mean of the other ranks" in capsys.readouterr().out


def test_a_cpu_has_no_meter(capsys):
    assert make_energy_meter(CPU, notes=False) is None
    assert capsys.readouterr().out == ""
    assert make_energy_meter(CPU, notes=True) is None
    assert capsys.readouterr().out == "--log-energy: the log shows no energy, since only GPUs count it\n"


class Nvml:
    """Behaves as NVML with one GPU."""

    def __init__(self, counts=True):
        self.counts, self.millijoules = counts, 1500

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, device):
        device._obj.value = 7
        return 0 if uuid == b"GPU-12ab" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, device, energy):
        assert isinstance(device, ctypes.c_void_p) and device.value == 7
        energy._obj.value = self.millijoules
        return 0 if self.counts else 3


def test_the_counter_of_the_driver():
    nvml = Nvml()
    read = energy_counter("12ab", lambda name: nvml)
    assert read() == 1.5
    nvml.millijoules = 1 << 40  # more than 32 bits
    assert read() == (1 << 40) / 1000
    nvml.counts = False
    assert math.isnan(read())


def test_a_gpu_without_counter_is_named():
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(UserError, match=r"NVML, .* cannot be loaded: libnvidia-ml.so.1"):
        energy_counter("12ab", absent)
    with pytest.raises(UserError, match="GPU 12ab: nvmlDeviceGetTotalEnergyConsumption returns 3"):
        energy_counter("12ab", lambda name: Nvml(counts=False))
    with pytest.raises(UserError, match="GPU 9f: nvmlDeviceGetHandleByUUID returns 6"):
        energy_counter("9f", lambda name: Nvml())
