"""Reports the mix of data sets that a run with a blend has read, at each log line."""

from collections.abc import Mapping

import numpy as np

from megatron.data.datasets.blended_dataset import BlendedDataset
from megatron.data.datasets.staged_blend import StagedBlend
from megatron.training.hooks.hook import Hook
from megatron.training.state import TrainState


class Mix:
    """The shares of the data sets of a blend in the first samples of a run.

    `names` has all data sets in the order of the flags; the blend may leave some of them out.
    """

    def __init__(self, blend: BlendedDataset | StagedBlend, names: tuple[str, ...]) -> None:
        self.blend = blend
        sources = range(len(names)) if isinstance(blend, StagedBlend) else blend.sources
        self.names = [names[number] for number in sources]

    def __call__(self, consumed: int) -> Mapping[str, float]:
        """Returns the share of each data set in the first `consumed` samples of the run."""
        counts = (
            self.blend.order.taken(consumed)[2] if isinstance(self.blend, StagedBlend) else self.blend.taken(consumed)
        )
        return self.shares(counts)

    def shares(self, counts: np.ndarray) -> Mapping[str, float]:
        """Turns numbers of samples by data set into shares. Data sets without samples are left out."""
        total = max(int(counts.sum()), 1)
        return {name: int(count) / total for name, count in zip(self.names, counts, strict=True) if count}


class MixReport(Hook):
    """Prints which share of the samples came from each data set, at each log line and when a stage begins."""

    def __init__(self, mix: Mix, state: TrainState, log_interval: int) -> None:
        self._mix = mix
        self._order = mix.blend.order if isinstance(mix.blend, StagedBlend) else None
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
        stage, of_stage, of_run = self._order.taken(consumed)
        text = f"data: stage {stage + 1} of {len(self._order.stages)} from sample {self._order.starts[stage]}"
        shares = _text(self._mix.shares(of_stage)), _text(self._mix.shares(of_run))
        return f"{text} | of the stage: {shares[0]} | of the run: {shares[1]}"


def _text(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
