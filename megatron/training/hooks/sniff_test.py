"""--gpu-sniff-test-interval: measures every rank's speed at intervals, and names ranks that differ from the others."""

import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.communication.collectives import (
    Group,
    all_to_all_rows,
    group_rank,
    group_size,
    numbers_of_ranks,
    start_exchange,
)
from megatron.training.hooks.hook import Hook

_REPEATS = 5
_UNITS = {"matrix products": "TFLOP/s", "all-to-all": "GB/s", "send and receive": "GB/s"}


class SniffTest(Hook):
    """Measures matrix products, an all-to-all among all ranks and messages between neighbours after every `interval`-th
    step. The first rank prints the mean of each test, and the ranks that are more than one standard deviation from it.

    The tests wait for the device. `world` is the group of all ranks (None: one rank, which sends nothing).
    """

    def __init__(self, interval: int, world: Group, device: torch.device) -> None:
        self.interval = interval
        self._world, self._device = world, device
        on_gpu = device.type == "cuda"
        self._width = 4096 if on_gpu else 256
        self._numbers = 2**24 if on_gpu else 2**16  # that a rank sends in one test
        self._type = torch.bfloat16 if on_gpu else torch.float32

    def after_step(self, iteration: int) -> None:
        """Runs the tests if the interval divides the iteration."""
        if iteration % self.interval:
            return
        rates = numbers_of_ranks([self._rate(work, run) for work, run in self._tests()])
        if group_rank(self._world) == 0:
            for line in sniff_report(rates):
                print(f"iteration {iteration}: {line}", flush=True)

    def _tests(self) -> Iterator[tuple[float, Callable[[], object]]]:
        """Yields tests: the work of one run (operations or bytes, in units of 1e12 or 1e9), and the run."""
        factor = torch.ones(self._width, self._width, dtype=self._type, device=self._device)
        yield 2 * self._width**3 / 1e12, lambda: factor @ factor
        ranks = group_size(self._world)
        if ranks == 1:
            return
        rank = group_rank(self._world)
        sent = torch.ones(self._numbers // ranks * ranks, dtype=self._type, device=self._device)
        received = torch.empty_like(sent)
        size = sent.numel() * sent.element_size() / 1e9
        yield size * (ranks - 1) / ranks, lambda: all_to_all_rows(sent, self._world)
        yield size, lambda: start_exchange(sent, (rank + 1) % ranks, received, (rank - 1) % ranks, self._world).wait()

    def _rate(self, work: float, run: Callable[[], object]) -> float:
        """Returns the work per second, after one run that is not timed."""
        run()
        self._wait()
        began = time.perf_counter()
        for _ in range(_REPEATS):
            run()
        self._wait()
        return _REPEATS * work / max(time.perf_counter() - began, 1e-9)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def sniff_report(rates: Sequence[Sequence[float]]) -> Iterator[str]:
    """Yields a sentence for each test, from the rates of every rank, rank by rank."""
    for (name, unit), of_ranks in zip(_UNITS.items(), zip(*rates, strict=True), strict=False):
        values = torch.tensor(of_ranks, dtype=torch.float64)
        mean, deviation = float(values.mean()), float(values.std(correction=0))
        text = f"sniff test of {name}: mean {mean:.4g} {unit}, deviation {deviation / mean:.1%}"
        far = _far(values, mean, deviation)
        yield text + (f"; outside it: {', '.join(far)}" if far else "")


def _far(values: Tensor, mean: float, deviation: float) -> list[str]:
    """Returns the ranks that are more than one standard deviation from the mean, and by how much."""
    apart = [(rank, value - mean) for rank, value in enumerate(values.tolist())]
    is_far = [
        (rank, far) for rank, far in apart if abs(far) > deviation and not math.isclose(abs(far), deviation)
    ]  # of two ranks both are exactly at it
    return [f"rank {rank} ({far / mean:+.1%})" for rank, far in is_far]
