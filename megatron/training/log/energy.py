"""--log-energy: the energy that GPUs use, as NVML (the library of NVIDIA's driver) counts it."""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.communication.collectives import numbers_of_ranks
from megatron.core.exceptions import UserError
from megatron.training.log.metrics import synchronization_allowed
from megatron.training.log.throughput import StepClock

NVML = "libnvidia-ml.so.1"


class EnergyMeter(StepClock):
    """Measures the energy that the GPUs of all ranks use in training steps, without evaluations and saves: a clock that
    counts joules. All ranks make the same calls.

    `read` returns the energy in joules that this rank's GPU has used so far, NaN if it is not known. If the energy of
    some ranks is not known, the first call of `joules_per_gpu` prints a note on the rank with `notes`.
    """

    def __init__(self, device: torch.device, read: Callable[[], float], *, notes: bool = False) -> None:
        super().__init__(read)  # a clock subtracts pauses from any quantity that grows
        self._device, self._notes = device, notes

    def joules_per_gpu(self) -> float | None:
        """Returns the energy of a GPU since the restart, in joules: the mean over the ranks whose energy is known; None
        if it is known on no rank. Waits for the device."""
        with synchronization_allowed(self._device):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            found = [joules for (joules,) in numbers_of_ranks([self.seconds()])]
        known = [joules for joules in found if math.isfinite(joules)]
        if self._notes and len(known) < len(found):
            missing = [rank for rank, joules in enumerate(found) if not math.isfinite(joules)]
            rest = "the log shows the mean of the other ranks" if known else "the log shows no energy"
            print(f"--log-energy: the energy of the GPUs of ranks {missing} is not known; {rest}", flush=True)
        self._notes = False
        return sum(known) / len(known) if known else None


def make_energy_meter(device: torch.device, *, notes: bool) -> EnergyMeter | None:
    """Returns the meter of a rank; None on a CPU, where the rank with `notes` prints a note."""
    if device.type != "cuda":
        if notes:
            print("--log-energy: the log shows no energy, since only GPUs count it", flush=True)
        return None
    try:
        read = energy_counter(str(torch.cuda.get_device_properties(device).uuid))
    except UserError as error:
        if notes:
            print(f"--log-energy: {error}", flush=True)
        return EnergyMeter(device, lambda: math.nan, notes=notes)
    return EnergyMeter(device, read, notes=notes)


def energy_counter(uuid: str, load: Callable[[str], Any] = ctypes.CDLL) -> Callable[[], float]:
    """Returns a function that reads the joules that a GPU has used since its driver was loaded. It returns NaN if a
    later reading fails.

    `uuid` is torch's, without the prefix "GPU-". Raises UserError if NVML is absent, or does not count the energy of
    this GPU (before Volta).
    """
    try:
        nvml = load(NVML)
    except OSError as error:
        raise UserError(f"NVML, which counts energy, cannot be loaded: {error}") from None
    device, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
    for function, arguments in (
        ("nvmlInit_v2", ()),
        ("nvmlDeviceGetHandleByUUID", (f"GPU-{uuid}".encode(), ctypes.byref(device))),
        ("nvmlDeviceGetTotalEnergyConsumption", (device, ctypes.byref(energy))),
    ):
        status = getattr(nvml, function)(*arguments)
        if status != 0:
            raise UserError(f"NVML does not count the energy of GPU {uuid}: {function} returns {status}")

    def read() -> float:
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(energy))
        return math.nan if failed else energy.value / 1000.0  # it counts millijoules

    return read
