"""--data-stages: the stage and the achieved mix of the data, at each log line."""

from pathlib import Path

import numpy as np

from megatron.core.datasets.staged_blend import StagedBlend
from megatron.training.hooks.hook import Hook
from megatron.training.state import TrainState


class StageReport(Hook):
    """Prints, at each log line and when a stage begins, what shares of the samples came from each dataset."""

    def __init__(self, blend: StagedBlend, state: TrainState, log_interval: int) -> None:
        self._order = blend.order
        self._state = state
        self._interval = log_interval
        self._stage = -1

    def after_step(self, iteration: int) -> None:
        """Prints the line if it is due."""
        stage = self._order.stage_of(max(self._state.consumed_train_samples - 1, 0))
        if stage != self._stage or iteration % self._interval == 0:
            self._stage = stage
            print(self._line(), flush=True)

    def _line(self) -> str:
        consumed = self._state.consumed_train_samples
        stage, of_stage, of_run = self._order.taken(consumed)
        text = f"data: stage {stage + 1} of {len(self._order.stages)} from sample {self._order.starts[stage]}"
        return f"{text} | of the stage: {self._shares(of_stage)} | of the run: {self._shares(of_run)}"

    def _shares(self, counts: np.ndarray) -> str:
        total = max(int(counts.sum()), 1)
        names = (Path(prefix).name for prefix in self._order.prefixes)
        return ", ".join(f"{name} {count / total:.2%}" for name, count in zip(names, counts, strict=True) if count)
