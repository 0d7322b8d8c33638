"""The order in which a blend draws from its datasets: Megatron-LM's greedy rule, computed from a small state.

Sample s comes from the dataset with the largest error w_i * t - taken_i, where t = max(s, 1) and taken_i is the number
of samples drawn from dataset i so far. If errors are equal, the first dataset wins. Each sample depends on all samples
before it, so Megatron-LM stores a table of all samples. This module stores the counts `taken` only once per block of
samples. It computes them in order, up to the block that is read, and recomputes that block of the table.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from megatron.core.exceptions import UserError
from megatron.core.utils.compiled import compiled

_BLOCK = 1 << 14
_BLOCKS_KEPT = 4
_UNLIMITED = np.iinfo(np.int64).max


@dataclass(frozen=True)
class BlendSlice:
    """Consecutive samples of a blend."""

    dataset_index: np.ndarray
    """int16: the dataset that each sample comes from."""
    dataset_sample_index: np.ndarray
    """int64: the index of each sample in that dataset."""


class BlendOrder:
    """The order of a blend of `size` samples.

    Args:
        weights: share of each dataset, at least 0, with sum 1. No sample is drawn from a dataset of weight 0, while
            Megatron-LM's rule may draw one.
        size: number of samples in the blend.
        limits: number of samples in each dataset, after which no more are drawn from it. None: no limit.

    Memory: 8 bytes per dataset and block (of at least 16384 samples) up to the furthest sample read, and four blocks.
    """

    def __init__(self, weights: np.ndarray, size: int, limits: np.ndarray | None = None) -> None:
        self.weights = np.asarray(weights, dtype=np.float64)
        self.size = size
        if len(self.weights) > np.iinfo(np.int16).max:
            raise UserError(f"a blend of {len(self.weights)} datasets; at most {np.iinfo(np.int16).max} can be blended")
        bounds = np.full(len(self.weights), _UNLIMITED) if limits is None else np.asarray(limits, dtype=np.int64)
        self._limits = np.where(self.weights > 0, bounds, 0)
        # With many datasets blocks are larger, so that the counts need less memory than the table.
        self.block = max(_BLOCK, 1 << (256 * len(self.weights) - 1).bit_length())
        self._counts = np.zeros((-(-size // self.block) + 1, len(self.weights)), np.int64)
        self._known = 1
        self._slices: OrderedDict[int, BlendSlice] = OrderedDict()

    @property
    def known_counts(self) -> np.ndarray:
        """int64 [blocks, datasets]: samples drawn from each dataset before each block, as far as computed."""
        return self._counts[: self._known]

    def adopt_counts(self, counts: np.ndarray) -> bool:
        """Copies the `known_counts` of another object of the same blend. Returns False if they do not fit."""
        if counts.dtype != np.int64 or counts.ndim != 2 or not 1 <= len(counts) <= len(self._counts):
            return False
        starts = np.minimum(np.arange(len(counts)) * self.block, self.size)
        if counts.shape[1] != len(self.weights) or not np.array_equal(counts.sum(axis=1), starts):
            return False
        if len(counts) > self._known:
            self._counts[: len(counts)] = counts
            self._known = len(counts)
        return True

    def locate(self, sample: int) -> tuple[int, int]:
        """Returns the dataset of a sample, and the sample's index in it."""
        part = self._replay(sample // self.block)
        row = sample % self.block
        return int(part.dataset_index[row]), int(part.dataset_sample_index[row])

    def indices(self, start: int, stop: int) -> BlendSlice:
        """Returns the samples [start, stop). `stop` is limited to the size of the blend."""
        stop = min(stop, self.size)
        if stop <= start:
            return BlendSlice(np.empty(0, np.int16), np.empty(0, np.int64))
        dataset_index = np.empty(stop - start, np.int16)
        dataset_sample_index = np.empty(stop - start, np.int64)
        for number in range(start // self.block, (stop - 1) // self.block + 1):
            part, first = self._replay(number), number * self.block
            source = slice(max(start - first, 0), min(stop - first, self.block))
            target = slice(max(first - start, 0), max(first - start, 0) + source.stop - source.start)
            dataset_index[target] = part.dataset_index[source]
            dataset_sample_index[target] = part.dataset_sample_index[source]
        return BlendSlice(dataset_index, dataset_sample_index)

    def counts(self) -> np.ndarray:
        """Returns int64 [datasets]: samples that the whole blend draws from each dataset. Computes the whole order."""
        self._reach(len(self._counts) - 1)
        return self._counts[-1].copy()

    def taken(self, stop: int) -> np.ndarray:
        """Returns int64 [datasets]: samples that the first `stop` ones of the blend draw from each dataset."""
        number = min(stop, self.size) // self.block
        start = number * self.block
        part = self.indices(start, stop)  # first: it computes the counts before its block
        drawn = np.bincount(part.dataset_index, minlength=len(self.weights)).astype(np.int64)
        self._reach(number)
        return self._counts[number] + drawn

    def upper_bounds(self) -> np.ndarray:
        """Returns int64 [datasets]: upper bounds of `counts`, without computing the order.

        The rule draws from the dataset with the largest error. The mean of the errors is (t * sum(w) - s) / n, which is
        at least 0 up to rounding. So the largest error is at least 0, too: taken_i <= w_i * t before the draw. `slack`
        is a generous bound of the rounding.
        """
        last = float(max(self.size - 1, 1))
        slack = last * (abs(1.0 - math.fsum(self.weights)) + 2.0**-50)
        bounds = np.floor(self.weights * last * (1.0 + 2.0**-50) + slack).astype(np.int64) + 1
        return np.minimum(bounds, self._limits)

    def _replay(self, number: int) -> BlendSlice:
        """Computes block `number` of the table."""
        if number in self._slices:
            self._slices.move_to_end(number)
            return self._slices[number]
        self._reach(number)
        start, stop = number * self.block, min((number + 1) * self.block, self.size)
        part = BlendSlice(np.empty(stop - start, np.int16), np.empty(stop - start, np.int64))
        taken = self._counts[number].copy()
        self._draw(taken, start, stop, part)
        if self._known == number + 1:
            self._counts[number + 1] = taken
            self._known += 1
        self._slices[number] = part
        if len(self._slices) > _BLOCKS_KEPT:
            self._slices.popitem(last=False)
        return part

    def _reach(self, number: int) -> None:
        """Computes the counts before block `number`."""
        nothing = BlendSlice(np.empty(0, np.int16), np.empty(0, np.int64))
        while self._known <= number:
            start = (self._known - 1) * self.block
            self._counts[self._known] = self._counts[self._known - 1]
            self._draw(self._counts[self._known], start, min(start + self.block, self.size), nothing)
            self._known += 1

    def _draw(self, taken: np.ndarray, start: int, stop: int, part: BlendSlice) -> None:
        drawn = _draw_greedily(
            self.weights, self._limits, taken, start, stop, part.dataset_index, part.dataset_sample_index
        )
        if drawn < stop - start:
            raise IndexError(f"all datasets of the blend are used up after {start + drawn} of {self.size} samples")


@compiled
def _draw_greedily(
    weights: np.ndarray,
    limits: np.ndarray,
    taken: np.ndarray,
    start: int,
    stop: int,
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
) -> int:
    """Draws samples [start, stop), advances `taken`, and writes each draw unless the outputs are empty. Returns the
    number of draws.

    The error of a dataset grows until a sample is drawn from it, and rounding keeps the order of w * t for growing t.
    As long as the largest error is at least `threshold`, a dataset whose error stays below the threshold during the
    next steps cannot have the largest error. So only the other datasets, the candidates, are compared. The threshold
    follows the largest errors. If it was too high, the remaining steps are repeated with a lower threshold.
    """
    steps_ahead = 16
    lowest = -1.7976931348623157e308
    record = dataset_index.shape[0] > 0
    num_datasets = weights.shape[0]
    level = np.empty(num_datasets, np.float64)  # taken, or infinite if the dataset is used up
    for i in range(num_datasets):
        level[i] = taken[i] if taken[i] < limits[i] else np.inf
    candidates = np.empty(num_datasets, np.int64)
    weight = np.empty(num_datasets, np.float64)
    drawn = np.empty(num_datasets, np.float64)
    threshold = lowest
    sample = start
    while sample < stop:
        until = min(sample + steps_ahead, stop)
        horizon = max(float(until), 1.0)
        count = 0
        for i in range(num_datasets):
            candidates[count] = i  # overwritten unless it counts: no branch to mispredict
            count += 1 if weights[i] * horizon - level[i] >= threshold else 0
        if count == 0 and threshold == lowest:
            break
        for k in range(count):
            weight[k] = weights[candidates[k]]
            drawn[k] = level[candidates[k]]
        smallest_best = np.inf
        first = sample
        while sample < until:
            t = max(float(sample), 1.0)
            best = -1
            best_error = lowest
            for k in range(count):
                error = weight[k] * t - drawn[k]
                if error > best_error:
                    best_error = error
                    best = k
            if best < 0 or best_error < threshold:
                break
            smallest_best = min(smallest_best, best_error)
            i = candidates[best]
            if record:
                dataset_index[sample - start] = i
                dataset_sample_index[sample - start] = taken[i]
            taken[i] += 1
            drawn[best] = taken[i] if taken[i] < limits[i] else np.inf
            level[i] = drawn[best]
            sample += 1
        if sample == first:
            threshold = lowest
        elif sample < until:
            threshold -= 0.1
        else:
            threshold = smallest_best - 0.02
    return sample - start
