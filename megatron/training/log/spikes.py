"""--check-for-spiky-loss and --check-for-large-grads: name iterations whose loss or gradient norm is far above those of
the first iterations."""

from collections.abc import Sequence

import torch

from megatron.core.health.rerun_state_machine import RerunStateMachine
from megatron.training.log.records import LogWriter, Speed, StepRecord

FACTOR = 10.0
FIRST = 100
"""Number of first iterations. Later values are compared with the largest value of these."""


class SpikeWatch(LogWriter):
    """Prints a line for each loss or gradient norm that is at least `FACTOR` times the largest one of the first `FIRST`
    iterations."""

    def __init__(self, losses: bool = True, gradients: bool = False) -> None:
        self.losses, self.gradients = losses, gradients
        self._known = RerunStateMachine()

    def steps(self, steps: Sequence[StepRecord], speed: Speed) -> None:
        """Looks at each iteration's losses, or at the norm of its gradient."""
        for step in steps:
            values = dict(step.losses) if self.losses else {}
            if self.gradients and step.grad_norm is not None:
                values["grad norm"] = step.grad_norm
            for name, value in values.items():
                if self._known.is_unexpectedly_large(torch.tensor(value), FACTOR, name, FIRST):
                    print(
                        f"iteration {step.iteration}: {name} {value:.6g} is at least {FACTOR:.0f} times the largest of "
                        f"the first {FIRST} iterations",
                        flush=True,
                    )
