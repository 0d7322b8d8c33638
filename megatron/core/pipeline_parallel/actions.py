"""What a rank of a pipeline may be told to do."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """What is done."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of a chunk's input and of its weights."""
    INPUT_GRADIENT = "X"
    """Backward without the products that give weight gradients, which are put off."""
    WEIGHT_GRADIENT = "W"
    """The products that were put off."""
    SEND_FORWARD = ">F"
    RECEIVE_FORWARD = "<F"
    SEND_BACKWARD = ">B"
    RECEIVE_BACKWARD = "<B"
    PAIR = "P"
    """A forward and the backward of another micro-batch, which take turns (see `interleaving`)."""
    SYNC = "S"
    """From here on gradients of the chunk may be reduced: only its last micro-batch still adds to them."""


COMPUTES = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.PAIR})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD})


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do for one micro-batch of one model chunk of this rank."""

    kind: Kind
    micro_batch: int
    chunk: int = 0
    peer: int | None = None
    """The pipeline rank that a send goes to or a receive comes from."""
    backward: "Action | None" = None
    """Of a pair, whose other fields are those of its forward."""

    @property
    def parts(self) -> tuple["Action", ...]:
        """A pair's forward and backward; of everything else, itself."""
        if self.backward is None:
            return (self,)
        return Action(Kind.FORWARD, self.micro_batch, self.chunk), self.backward

    def __str__(self) -> str:
        if self.backward is not None:
            return "|".join(map(str, self.parts))
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.value}{self.micro_batch}{chunk}"


def pair(forward: Action, backward: Action) -> Action:
    """The two as one."""
    assert (forward.kind, backward.kind) == (Kind.FORWARD, Kind.BACKWARD), (forward, backward)
    return Action(Kind.PAIR, forward.micro_batch, forward.chunk, backward=backward)


def show(actions: Sequence[Action]) -> str:
    """One line: F0 B0 F1 S1 B1; of a pair F1|B0."""
    return " ".join(map(str, actions))
