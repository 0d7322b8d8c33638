"""Throughput of the model: operations of a second, and their share of the peak of the device."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator

import torch

from megatron.core.adapters.costs import adapter_training_flops
from megatron.core.transformer.layer_costs import training_flops
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.log.records import Speed


def flops_of_samples(config: PretrainConfig, padded_vocab_size: int, samples: int) -> int:
    """Returns the floating point operations of training on so many samples: Megatron-LM's count, or, in a run with
    adapters, that of `adapter_training_flops`, which leaves the gradients of frozen weights out."""
    length = config.data.seq_length
    assert length is not None
    if config.adapters.lora_rank is not None:
        return adapter_training_flops(config.adapters, config.transformer, padded_vocab_size, length, samples)
    return training_flops(
        config.transformer,
        padded_vocab_size,
        length,
        samples,
        config.decoder_seq_length,
        bidirectional=config.is_bidirectional,
    )


class StepClock:
    """Wall time of training; stopped during evaluation and saving."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = now()
        self._stopped_at: float | None = None

    def seconds(self) -> float:
        """Returns the time since the clock was created or restarted."""
        return (self._now() if self._stopped_at is None else self._stopped_at) - self._started

    def restart(self) -> None:
        """Starts again from zero."""
        self._started = self._now() if self._stopped_at is None else self._stopped_at

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock inside the context. Pauses do not nest."""
        assert self._stopped_at is None, "the clock is stopped already"
        self._stopped_at = self._now()
        try:
            yield
        finally:
            self._started += self._now() - self._stopped_at
            self._stopped_at = None


def speed(
    seconds: float,
    iterations: int,
    *,
    tokens: int | None = None,
    flops: float | None = None,
    world_size: int = 1,
    peak_tflops: float | None = None,
) -> Speed:
    """Returns the rates of `iterations` steps in which all ranks together processed `tokens` and computed `flops`.

    The utilisation is relative to `peak_tflops` of one device; None without a known peak.
    """
    tflops = None if flops is None or seconds <= 0.0 else flops / (seconds * 1e12 * world_size)
    return Speed(
        seconds_per_iteration=seconds / max(iterations, 1),
        tokens_per_second=None if tokens is None or seconds <= 0.0 else tokens / seconds,
        tflops_per_device=tflops,
        mfu=None if tflops is None or peak_tflops is None else tflops / peak_tflops,
    )


_DENSE_PEAKS: tuple[tuple[frozenset[str], float, float | None], ...] = tuple(
    # Words of the device's name, 16-bit TFLOP/s, fp8 TFLOP/s of tensor cores, without sparsity and with float32
    # accumulation. Source: NVIDIA's data sheets and architecture papers; a rate given only with sparsity is halved.
    # The first row whose words all occur in the name is taken, so a special edition precedes its family.
    (frozenset(words.split()), sixteen_bit, eight_bit)
    for words, sixteen_bit, eight_bit in (
        ("GB200", 2500.0, 5000.0),
        ("B200", 2250.0, 4500.0),
        ("H200 NVL", 835.5, 1671.0),
        ("H200", 989.4, 1978.9),
        ("GH200", 989.4, 1978.9),
        ("H100 NVL", 835.5, 1671.0),
        ("H100 PCIe", 756.5, 1513.0),
        ("H100 HBM3", 989.4, 1978.9),
        ("H800 PCIe", 756.5, 1513.0),
        ("H800", 989.4, 1978.9),
        ("A100", 312.0, None),
        ("A800", 312.0, None),
        ("L40S", 362.05, 733.0),
        ("A30", 165.0, None),
    )
)

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def peak_tflops(device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> float | None:
    """Returns the peak TFLOP/s of a device for matrix products in `dtype` (16-bit, or fp8), or None if it is unknown.

    It is unknown for CPUs, devices that the table does not list, slices of a GPU (MIG), and types other than 16-bit and
    fp8: a missing utilisation is better than a wrong one.
    """
    if device.type != "cuda":
        return None
    return peak_of_device_name(torch.cuda.get_device_name(device), dtype, fp8=fp8)


def peak_of_device_name(name: str, dtype: torch.dtype, *, fp8: bool = False) -> float | None:
    """Returns the same as `peak_tflops` for the name that torch.cuda.get_device_name returns."""
    words = set(re.split(r"[^A-Za-z0-9]+", name))
    if "MIG" in words or (dtype not in _SIXTEEN_BIT and not fp8):
        return None
    for needed, sixteen_bit, eight_bit in _DENSE_PEAKS:
        if needed <= words:
            return eight_bit if fp8 else sixteen_bit
    return None
