"""What a pipeline rank does in a step, as data: a list of actions that a test can read and a runner executes.

Pure functions of sizes. One stage runs so far; orders of more stages add kinds (send, receive, dW, unshard, reduce) and
functions here, and a method each to the runner.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """What is done."""

    FORWARD = "F"
    BACKWARD = "B"
    SYNC = "S"
    """From here on gradients of the chunk may be reduced: only its last backward is still to come."""


@dataclass(frozen=True)
class Action:
    """One thing to do for one micro-batch of one model chunk of this rank."""

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}"


def one_stage(num_microbatches: int, forward_only: bool = False) -> list[Action]:
    """Without pipeline parallelism: each micro-batch forward and backward, one after the other."""
    actions = []
    for number in range(num_microbatches):
        actions.append(Action(Kind.FORWARD, number))
        if not forward_only:
            if number == num_microbatches - 1:
                actions.append(Action(Kind.SYNC, number))
            actions.append(Action(Kind.BACKWARD, number))
    return actions


def show(actions: Sequence[Action]) -> str:
    """One line: F0 B0 F1 S1 B1."""
    return " ".join(map(str, actions))
