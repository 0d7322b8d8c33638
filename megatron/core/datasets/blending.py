"""In which order a blend draws from its datasets: the published greedy rule, answered from a small state.

For sample s, with t = max(s, 1), the dataset with the largest error w_i * t - taken_i comes next (the first one of
equals), taken_i being the number of samples drawn from it so far. The answer for s depends on all before it, and the
published way is a table of every sample. Here the counts `taken` are kept once per block of samples, found in order as
far as they are asked for, and a block's part of the table is replayed from them when it is read.
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
    """int64: the sample's number in that dataset."""


class BlendOrder:
    """The order of a blend of `size` samples.

    Args:
        weights: share of each dataset, non-negative, summing to one. A dataset of weight zero is never drawn from (the
            published rule may draw one sample from it).
        size: samples in the blend.
        limits: samples that each dataset has; one that is used up is drawn from no more. None: no such bound.

    Memory: 8 bytes a dataset for each block of at least 16384 samples, as far as the blend was read, and four blocks.
    """

    def __init__(self, weights: np.ndarray, size: int, limits: np.ndarray | None = None) -> None:
        self.weights = np.asarray(weights, dtype=np.float64)
        self.size = size
        if len(self.weights) > np.iinfo(np.int16).max:
            raise UserError(f"a blend of {len(self.weights)} datasets; at most {np.iinfo(np.int16).max} can be blended")
        bounds = np.full(len(self.weights), _UNLIMITED) if limits is None else np.asarray(limits, dtype=np.int64)
        self._limits = np.where(self.weights > 0, bounds, 0)
        # Many datasets: larger blocks, so that the counts do not outgrow what they replace.
        self.block = max(_BLOCK, 1 << (256 * len(self.weights) - 1).bit_length())
        self._counts = np.zeros((-(-size // self.block) + 1, len(self.weights)), np.int64)
        self._known = 1
        self._slices: OrderedDict[int, BlendSlice] = OrderedDict()

    @property
    def known_counts(self) -> np.ndarray:
        """int64 [blocks, datasets]: samples drawn before each block, as far as it was found out."""
        return self._counts[: self._known]

    def adopt_counts(self, counts: np.ndarray) -> bool:
        """Take over the `known_counts` of another object of the same blend; False if they cannot be such."""
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
        """(dataset, number of the sample in it) of one sample."""
        part = self._replay(sample // self.block)
        row = sample % self.block
        return int(part.dataset_index[row]), int(part.dataset_sample_index[row])

    def indices(self, start: int, stop: int) -> BlendSlice:
        """The samples [start, stop), cut off at the size of the blend."""
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
        """int64 [datasets]: samples drawn from each in the whole blend. Replays all of it."""
        self._reach(len(self._counts) - 1)
        return self._counts[-1].copy()

    def upper_bounds(self) -> np.ndarray:
        """int64 [datasets]: never less than `counts`, and found without replaying.

        A dataset is drawn from only while it has the largest error. The errors' mean is (t * sum(w) - s) / n, which is
        not below zero but for rounding, so the largest is not either: taken_i <= w_i * t before the draw. `slack` is a
        generous bound of that rounding.
        """
        last = float(max(self.size - 1, 1))
        slack = last * (abs(1.0 - math.fsum(self.weights)) + 2.0**-50)
        bounds = np.floor(self.weights * last * (1.0 + 2.0**-50) + slack).astype(np.int64) + 1
        return np.minimum(bounds, self._limits)

    def _replay(self, number: int) -> BlendSlice:
        """The part of the table that is block `number`."""
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
        """Find the counts before block `number`."""
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
    """Draw samples [start, stop), advancing `taken`; write each draw unless the outputs are empty. Returns how many.

    Errors only grow until a dataset is drawn from, and rounding keeps the order of w * t for growing t. So in the next
    few steps a dataset whose error will still be below `threshold` then cannot be the largest, as long as the largest
    one found is not below it. Only the others, the candidates, are compared. The threshold follows the largest errors
    seen; where it was too high, fewer steps count and it is lowered.
    """
    steps_ahead = 16
    lowest = -1.7976931348623157e308
    record = dataset_index.shape[0] > 0
    num_datasets = weights.shape[0]
    level = np.empty(num_datasets, np.float64)  # taken, or infinite where nothing is left
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
