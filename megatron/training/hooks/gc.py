"""--manual-gc: runs Python's garbage collector at chosen steps, the same on every rank, instead of automatically.

A collection stops one rank for some milliseconds, while the others wait for it in the next collective. If all ranks
collect in the same step, they lose this time once instead of once per rank.
"""

import gc

from megatron.training.hooks.hook import Hook


class ManualGarbageCollection(Hook):
    """Switches automatic collection off during training.

    Args:
        interval: number of iterations between two collections; 0: no collection between steps.
        evaluation: also collect before and after each evaluation.
    """

    def __init__(self, interval: int = 0, evaluation: bool = True) -> None:
        self.interval = interval
        self.evaluation = evaluation
        self._was_enabled = False
        self._has_stepped = False

    def on_start(self, iteration: int) -> None:
        """Switches automatic collection off, after one collection."""
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()

    def after_step(self, iteration: int) -> None:
        """Collects if the interval divides the iteration, and after the first step: modules that it imports may leave
        frames, which have tensors."""
        if not self._has_stepped or (self.interval > 0 and iteration % self.interval == 0):
            gc.collect()
        self._has_stepped = True

    def before_evaluate(self, iteration: int) -> None:
        """Collects the youngest generation if `evaluation` is set."""
        if self.evaluation:
            # The youngest generation is enough: evaluation leaves new objects, and older ones were examined before.
            gc.collect(generation=0)

    after_evaluate = before_evaluate

    def on_exit(self, iteration: int) -> None:
        """Switches automatic collection on again if it was on before."""
        if self._was_enabled:
            gc.enable()
