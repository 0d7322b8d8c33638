"""The properties of a micro-batch in addition to its tokens: one record, an argument of the model's forward."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron.core.tokens import RngPosition


class CooperativeTurn:
    """Lets work of a backward run while the backward waits for a communication.

    What forward saves refers to this object, so backward finds it.
    """

    def __init__(self) -> None:
        self._work: Callable[[], None] | None = None

    def yield_turn(self) -> None:
        """Runs the work of `given_to`; without it, does nothing. Called in backward, after a communication has started
        and before it is waited for."""
        if self._work is not None:
            self._work()

    @contextlib.contextmanager
    def given_to(self, work: Callable[[], None]) -> Iterator[None]:
        """Inside the context, every `yield_turn` calls `work`."""
        self._work = work
        try:
            yield
        finally:
            self._work = None


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch in one step: its position for random numbers, its loss scale, its turn."""

    rng_position: RngPosition | None = None
    """Position of the micro-batch in the run, for random numbers; used where `Tokens.random` is None."""
    auxiliary_scale: Tensor | None = None
    """Gradient of every loss that a layer adds to the model's loss (see `ops.attached_loss`): a scalar on the device;
    None: 1."""
    turn: CooperativeTurn | None = None
    """Set if backward delays weight gradients until it waits for a communication (`--delay-wgrad-compute`)."""
