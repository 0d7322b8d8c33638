"""Counts the samples that a run has drawn from each data set of a blend, and prints their mix at each log line."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
        total = max(sum(counts.values()), 1)
        return {self._name(key): count / total for key, count in counts.items() if count}

    def _name(self, key: str) -> str:
        """Returns the name of a data set. One that only an earlier part of the run had is called by its file, unless
        another one has that name."""
        short = Path(key).name
        return self._names.get(key) or (key if short in self._names.values() else short)

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


def _text(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
