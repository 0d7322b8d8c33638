"""The properties of a micro-batch in addition to its tokens: one record, an argument of the model's forward."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.core.tokens import RngPosition


class CooperativeTurn(Protocol):
    """Lets another micro-batch compute while this one waits for a communication."""

    def yield_turn(self) -> None:
        """Passes the turn on. Returns when it is this micro-batch's turn again.

        Called after a communication has started and before it is waited for, in forward and in backward.
        """


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch in one step: its position for random numbers, its loss scale, its turn."""

    rng_position: RngPosition | None = None
    """Position of the micro-batch in the run, for random numbers; used where `Tokens.random` is None."""
    auxiliary_scale: Tensor | None = None
    """Gradient of every loss that a layer adds to the model's loss (see `ops.attached_loss`): a scalar on the device;
    None: 1."""
    turn: CooperativeTurn | None = None
    """Set if two micro-batches take turns in this process."""
