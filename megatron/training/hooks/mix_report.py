"""Counts the samples that a run has drawn from each data set of a blend, and prints their mix: the stages before the
first step, the mix so far at each log line, and beside the planned one at each save."""

import itertools
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.datasets.blend_stages import StageOrder
from megatron.data.datasets.blended_dataset import BlendedDataset
from megatron.data.datasets.staged_blend import StagedBlend
from megatron.training.hooks.hook import Hook
from megatron.training.state import TrainState


class Mix:
    """Counts the samples that a run has drawn from each of its data sets.

    Args:
        dataset: the training data: a blend, or a single data set.
        keys: texts that identify the data sets in checkpoints, in the order of the flags. A blend may leave some out.
        names: what the log calls them, in the same order.
    """

    def __init__(self, dataset: Any, keys: Sequence[str], names: Sequence[str]) -> None:
        self.dataset = dataset
        sources = dataset.sources if isinstance(dataset, BlendedDataset) else range(len(keys))
        self.keys = [keys[number] for number in sources]
        self._names = dict(zip(keys, names, strict=True))
        self._before: dict[str, int] = {}
        """Samples drawn before `_since`, by key."""
        self._since = 0
        """Number of samples before the first one that this run's order of data sets decides."""

    @property
    def has_several(self) -> bool:
        """Whether the run has read more than one data set."""
        return len({*self.keys, *self._before}) > 1

    def continue_from(self, drawn: Mapping[str, int] | None, consumed: int, same_order: bool) -> Iterator[str]:
        """Continues a run that has drawn these numbers of its first `consumed` samples from each data set (None: the
        checkpoint does not say). Yields a sentence if some of them are not known: without `drawn` they are computed,
        which needs the `same_order` of data sets before."""
        if drawn is None and same_order:
            self._before, self._since = {}, 0
            return
        self._before, self._since = dict(drawn or {}), consumed
        unknown = consumed - sum(self._before.values())
        if unknown > 0 and self.has_several:
            yield (
                f"the mix of data sets in the log leaves out {unknown} of the {consumed} samples before this run: the "
                "checkpoint does not say from which data sets they came"
            )

    def drawn(self, consumed: int) -> dict[str, int]:
        """Returns how many of the first `consumed` samples of the run came from each data set, by key."""
        found = dict(self._before)
        counts = self._taken(consumed) - (self._taken(self._since) if self._since else 0)
        for key, count in zip(self.keys, counts.tolist(), strict=True):
            found[key] = found.get(key, 0) + count
        return found

    def __call__(self, consumed: int) -> Mapping[str, float]:
        """Returns the share of each data set in the first `consumed` samples of the run, by name."""
        return self._shares(self.drawn(consumed))

    def shares(self, counts: np.ndarray) -> Mapping[str, float]:
        """Turns numbers of samples by data set into shares. Data sets without samples are left out."""
        return self._shares(dict(zip(self.keys, counts.tolist(), strict=True)))

    def _shares(self, counts: Mapping[str, int]) -> Mapping[str, float]:
        total = sum(counts.values()) or 1
        return {self.name_of(key): count / total for key, count in counts.items() if count}

    def name_of(self, key: str) -> str:
        """Returns the name of a data set. One that only an earlier part of the run had is called by its file, unless
        another one has that name."""
        short = Path(key).name
        return self._names.get(key) or (key if short in self._names.values() else short)

    def planned(self, consumed: int) -> Mapping[str, float]:
        """Returns the share that the weights of this run plan for each data set in the first `consumed` samples."""
        if isinstance(self.dataset, StagedBlend):
            plan = self.dataset.order.planned(consumed)
        else:
            plan = self.dataset.order.weights if isinstance(self.dataset, BlendedDataset) else np.ones(1)
        return self.shares(plan)

    def _taken(self, consumed: int) -> np.ndarray:
        if isinstance(self.dataset, StagedBlend):
            return self.dataset.order.taken(consumed)[2]
        return self.dataset.taken(consumed) if isinstance(self.dataset, BlendedDataset) else np.array([consumed])


class MixReport(Hook):
    """Prints which share of the samples came from each data set, at each log line and when a stage begins."""

    def __init__(self, mix: Mix, state: TrainState, log_interval: int) -> None:
        self._mix = mix
        self._order = mix.dataset.order if isinstance(mix.dataset, StagedBlend) else None
        self._state = state
        self._interval = log_interval
        self._stage = 0 if self._order is None else -1

    def on_start(self, iteration: int) -> None:
        """Prints the table of the stages."""
        if self._order is not None:
            print("\n".join(self._table(self._order)), flush=True)

    def _table(self, order: StageOrder) -> Iterator[str]:
        """Yields a line for each stage, with a bar of its shares, and one for the whole run with the passes over each
        data set."""
        letters = dict(zip(self._mix.keys, itertools.cycle(string.ascii_letters), strict=False))
        width = max(len(str(order.size)), 4)
        for number, (start, each) in enumerate(zip(order.starts, order.orders, strict=True)):
            drawn = order.before[number + 1] - order.before[number]
            yield (
                f"data: stage {number + 1} from sample {start:>{width}}: {each.size:>{width}} samples "
                f"|{_bar(each.weights, letters.values())}| {_text(self._mix.shares(drawn))}"
            )
        passes = [
            f"{letter} {self._mix.name_of(key)}: {count} samples, {count / max(len(datasets[0]), 1):.2f} passes"
            for (key, letter), count, datasets in zip(
                letters.items(), order.before[-1].tolist(), self._mix.dataset.passes, strict=True
            )
            if datasets
        ]
        yield f"data: whole run: {'; '.join(passes)}"

    def after_save(self, iteration: int) -> None:
        """Prints the planned mix beside the achieved one."""
        consumed = self._state.consumed_train_samples
        achieved, planned = self._mix(consumed), self._mix.planned(consumed)
        names = dict.fromkeys([*planned, *achieved])
        parts = [f"{name} {planned.get(name, 0.0):.2%} / {achieved.get(name, 0.0):.2%}" for name in names]
        print(f"data: planned / achieved mix at iteration {iteration}: {', '.join(parts)}", flush=True)

    def after_step(self, iteration: int) -> None:
        """Prints the line if it is due."""
        stage = 0 if self._order is None else self._order.stage_of(max(self._state.consumed_train_samples - 1, 0))
        if stage != self._stage or iteration % self._interval == 0:
            self._stage = stage
            print(self._line(), flush=True)

    def _line(self) -> str:
        consumed = self._state.consumed_train_samples
        if self._order is None:
            return f"data: of the run: {_text(self._mix(consumed))}"
        stage, of_stage, _ = self._order.taken(consumed)
        text = f"data: stage {stage + 1} of {len(self._order.stages)} from sample {self._order.starts[stage]}"
        shares = _text(self._mix.shares(of_stage)), _text(self._mix(consumed))
        return f"{text} | of the stage: {shares[0]} | of the run: {shares[1]}"


_BAR = 40
"""Letters of a bar."""


def _bar(weights: np.ndarray, letters: Iterable[str]) -> str:
    """Returns a bar in which each data set's letter fills its share."""
    ends = np.rint(np.cumsum(weights) / weights.sum() * _BAR).astype(int)
    return "".join(letter * count for letter, count in zip(letters, np.diff(ends, prepend=0).tolist(), strict=True))


def _text(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
