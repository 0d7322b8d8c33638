"""The actions of a pipeline schedule: one step of one rank for one micro-batch."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class ActionKind(enum.Enum):
    """What an action does. The value is its letter in `format_actions`."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of a chunk's input and of its weights."""
    INPUT_GRADIENT = "X"
    """A backward pass that defers the matrix products of weight gradients."""
    WEIGHT_GRADIENT = "W"
    """The deferred matrix products of weight gradients."""
    SEND_FORWARD = ">F"
    RECEIVE_FORWARD = "<F"
    SEND_BACKWARD = ">B"
    RECEIVE_BACKWARD = "<B"
    SYNC = "S"
    """From this action on the chunk's gradients may be reduced: only its last micro-batch still adds to them."""


COMPUTES = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT})
SENDS = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD})
RECEIVES = frozenset({ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD})


@dataclass(frozen=True, slots=True)
class Action:
    """One step for one micro-batch of one model chunk of this rank."""

    kind: ActionKind
    micro_batch: int
    chunk: int = 0
    peer: int | None = None
    """The pipeline rank that a send goes to or a receive comes from."""

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.value}{self.micro_batch}{chunk}"


def format_actions(actions: Sequence[Action]) -> str:
    """Returns the actions on one line, such as `F0 B0 F1 S1 B1`."""
    return " ".join(map(str, actions))
