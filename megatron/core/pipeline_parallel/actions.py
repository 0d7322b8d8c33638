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
    PAIR = "P"
    """A forward and the backward of another micro-batch, which take turns (see `interleaving`)."""
    SYNC = "S"
    """From this action on the chunk's gradients may be reduced: only its last micro-batch still adds to them."""


COMPUTES = frozenset(
    {
        ActionKind.FORWARD,
        ActionKind.BACKWARD,
        ActionKind.INPUT_GRADIENT,
        ActionKind.WEIGHT_GRADIENT,
        ActionKind.PAIR,
    }
)
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
    backward: "Action | None" = None
    """The backward of a pair. The other fields of a pair describe its forward."""

    @property
    def members(self) -> tuple["Action", ...]:
        """The forward and the backward of a pair; for any other action, the action itself."""
        if self.backward is None:
            return (self,)
        return Action(ActionKind.FORWARD, self.micro_batch, self.chunk), self.backward

    def __str__(self) -> str:
        if self.backward is not None:
            return "|".join(map(str, self.members))
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.value}{self.micro_batch}{chunk}"


def pair(forward: Action, backward: Action) -> Action:
    """Returns the pair of a forward and a backward."""
    assert (forward.kind, backward.kind) == (ActionKind.FORWARD, ActionKind.BACKWARD), (forward, backward)
    return Action(ActionKind.PAIR, forward.micro_batch, forward.chunk, backward=backward)


def format_actions(actions: Sequence[Action]) -> str:
    """Returns the actions on one line, such as `F0 B0 F1 S1 B1`; a pair is written F1|B0."""
    return " ".join(map(str, actions))
