"""All that a rank of a pipeline does in a step, as data: a list that a test can read and a runner executes.

The order of computations is the schedule's (`orders`). In between go the exchanges with other ranks, and the moments
from which gradients may be reduced. Pure functions: nothing here communicates.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from megatron.core.pipeline_parallel.actions import COMPUTES, Action, Kind
from megatron.core.pipeline_parallel.orders import Schedule, computations
from megatron.core.pipeline_parallel.stages import Pipeline


def one_stage(num_microbatches: int, forward_only: bool = False, pairs: bool = False) -> tuple[Action, ...]:
    """Without pipeline parallelism: each micro-batch forward and backward, one after the other; with `pairs` each one's
    backward beside the forward of the next."""
    return actions_of(Schedule("1f1b", Pipeline(1), num_microbatches, forward_only, pairs=pairs), 0)


def actions_of(schedule: Schedule, rank: int) -> tuple[Action, ...]:
    """All that one rank does.

    A result is sent right after it is there. Messages from one rank to another arrive in the order in which they were
    sent, activations and gradients alike, so receives are posted in that order: up to the one that a computation needs,
    `ahead` computations before it. Between two chunks of one rank nothing is sent.
    """
    return lists_of(schedule)[rank]


@functools.lru_cache(maxsize=8)
def lists_of(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """What each rank does."""
    return lists_of_orders(computations(schedule), schedule)


def lists_of_orders(order: Sequence[Sequence[Action]], schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Returns what each rank does so that it computes in the given order, one list per rank. Of `schedule`, the
    pipeline and `ahead` are read."""
    mail = [defaultdict[int, list[Action]](list) for _ in order]  # [to][from]: what to receive, in order of sending
    for rank, actions in enumerate(order):
        for action in actions:
            for sent in _sent(schedule.pipeline, rank, action):
                assert sent.peer is not None
                mail[sent.peer][rank].append(_received(schedule.pipeline, rank, sent))
    return tuple(
        tuple(_with_sync(_with_exchange(schedule, rank, actions, mail[rank]))) for rank, actions in enumerate(order)
    )


def _sent(pipeline: Pipeline, rank: int, action: Action) -> Iterator[Action]:
    """The send that follows a computation; two may follow a pair."""
    for part in action.parts:
        stage = pipeline.stage(rank, part.chunk)
        if part.kind is Kind.FORWARD:
            kind, to = Kind.SEND_FORWARD, stage + 1
        elif part.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
            kind, to = Kind.SEND_BACKWARD, stage - 1
        else:
            continue
        if 0 <= to < pipeline.num_stages and pipeline.place(to)[0] != rank:
            yield Action(kind, part.micro_batch, part.chunk, pipeline.place(to)[0])


def _received(pipeline: Pipeline, rank: int, sent: Action) -> Action:
    """The other end of what `rank` sends."""
    stage = pipeline.stage(rank, sent.chunk)
    if sent.kind is Kind.SEND_FORWARD:
        return Action(Kind.RECEIVE_FORWARD, sent.micro_batch, pipeline.place(stage + 1)[1], rank)
    return Action(Kind.RECEIVE_BACKWARD, sent.micro_batch, pipeline.place(stage - 1)[1], rank)


_NEEDS = {
    Kind.FORWARD: Kind.RECEIVE_FORWARD,
    Kind.BACKWARD: Kind.RECEIVE_BACKWARD,
    Kind.INPUT_GRADIENT: Kind.RECEIVE_BACKWARD,
}
"""What a computation takes from the mail, if it comes by mail."""


def _with_exchange(
    schedule: Schedule, rank: int, actions: Sequence[Action], mail: dict[int, list[Action]]
) -> Iterator[Action]:
    found: dict[tuple[Kind | None, int, int], tuple[int, int]] = {
        (receive.kind, receive.micro_batch, receive.chunk): (peer, place)
        for peer, receives in mail.items()
        for place, receive in enumerate(receives)
    }
    coming = [(place, part) for place, action in enumerate(actions) for part in action.parts]
    forwards = {(part.micro_batch, part.chunk): place for place, part in coming if part.kind is Kind.FORWARD}
    posted: dict[int, int] = defaultdict(int)
    looked = 0
    for place, action in enumerate(actions):
        while looked < len(coming) and coming[looked][0] <= place + schedule.ahead:
            part = coming[looked][1]
            peer, last = found.get((_NEEDS.get(part.kind), part.micro_batch, part.chunk), (rank, -1))
            due = mail[peer][posted[peer] : last + 1]
            # Nobody listens for a gradient before its forward, which says what the gradient looks like.
            early = (r for r in due if r.kind is Kind.RECEIVE_BACKWARD and forwards[r.micro_batch, r.chunk] >= place)
            if any(early):
                break
            yield from due
            posted[peer] = max(posted[peer], last + 1)
            looked += 1
        yield action
        yield from _sent(schedule.pipeline, rank, action)


def _with_sync(actions: Iterator[Action]) -> list[Action]:
    """A SYNC before each chunk's last computation of gradients."""
    found = list(actions)
    last = {
        part.chunk: (place, part.micro_batch)
        for place, action in enumerate(found)
        for part in action.parts
        if part.kind in COMPUTES - {Kind.FORWARD}
    }
    for chunk, (place, micro_batch) in sorted(last.items(), key=lambda item: -item[1][0]):
        found.insert(place, Action(Kind.SYNC, micro_batch, chunk))
    return found
