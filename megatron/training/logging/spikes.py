"""--check-for-spiky-loss: says which iteration's loss is far above those of the first iterations."""

from collections.abc import Sequence

import torch

from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.training.logging.records import LogWriter, Speed, StepRecord

FACTOR = 10.0
FIRST = 100
"""Number of first iterations with whose largest loss the later ones are compared."""


class SpikeWatch(LogWriter):
    """Prints a line for each loss of at least `FACTOR` times the largest of the first `FIRST` iterations."""

    def __init__(self) -> None:
        self._known = RerunStateMachine()

    def steps(self, steps: Sequence[StepRecord], speed: Speed) -> None:
        """Looks at each iteration's losses."""
        for step in steps:
            for name, loss in step.losses.items():
                if self._known.is_unexpectedly_large(torch.tensor(loss), FACTOR, name, FIRST):
                    print(
                        f"iteration {step.iteration}: {name} {loss:.6g} is at least {FACTOR:.0f} times the largest of "
                        f"the first {FIRST} iterations",
                        flush=True,
                    )
