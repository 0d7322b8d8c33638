"""Makes the action list of each rank. The runner executes it, and tests can read it.

`orders` gives the order in which a rank computes. This module adds the sends and receives between ranks, and the SYNC
actions, after which gradients may be reduced. All functions are pure: nothing here communicates.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from megatron.core.pipeline_parallel.actions import COMPUTES, Action, ActionKind
from megatron.core.pipeline_parallel.orders import Schedule, compute_orders
from megatron.core.pipeline_parallel.stages import Pipeline


def rank_actions(schedule: Schedule, rank: int) -> tuple[Action, ...]:
    """Returns the actions of one pipeline rank, in order."""
    return all_rank_actions(schedule)[rank]


@functools.lru_cache(maxsize=8)
def all_rank_actions(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Returns the actions of all pipeline ranks."""
    return add_communication(compute_orders(schedule), schedule)


def add_communication(orders: Sequence[Sequence[Action]], schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Returns the actions of all ranks: the computations of `orders`, one list per rank, with sends, receives and SYNC
    between them. Reads only `schedule.pipeline` and `schedule.ahead`.

    A result is sent right after it is computed. Messages from one rank to another, activations and gradients alike,
    arrive in the order in which they were sent. So receives are posted in that order, `schedule.ahead` computations
    before the one that needs the message. Two chunks of one rank exchange nothing.
    """
    incoming = [defaultdict[int, list[Action]](list) for _ in orders]
    """[rank][sender]: the receives to post, in the order of sending."""
    for rank, actions in enumerate(orders):
        for action in actions:
            for send in _sends_after(schedule.pipeline, rank, action):
                assert send.peer is not None
                incoming[send.peer][rank].append(_receive_of(schedule.pipeline, rank, send))
    return tuple(
        tuple(_with_sync(_with_messages(schedule, rank, actions, incoming[rank])))
        for rank, actions in enumerate(orders)
    )


def _sends_after(pipeline: Pipeline, rank: int, action: Action) -> Iterator[Action]:
    """Yields the send that follows a computation, if its result goes to another rank."""
    stage = pipeline.stage_index(rank, action.chunk)
    if action.kind is ActionKind.FORWARD:
        kind, to = ActionKind.SEND_FORWARD, stage + 1
    elif action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
        kind, to = ActionKind.SEND_BACKWARD, stage - 1
    else:
        return
    if 0 <= to < pipeline.num_stages and pipeline.locate(to)[0] != rank:
        yield Action(kind, action.micro_batch, action.chunk, pipeline.locate(to)[0])


def _receive_of(pipeline: Pipeline, rank: int, send: Action) -> Action:
    """Returns the receive that matches a send of `rank`."""
    stage = pipeline.stage_index(rank, send.chunk)
    if send.kind is ActionKind.SEND_FORWARD:
        return Action(ActionKind.RECEIVE_FORWARD, send.micro_batch, pipeline.locate(stage + 1)[1], rank)
    return Action(ActionKind.RECEIVE_BACKWARD, send.micro_batch, pipeline.locate(stage - 1)[1], rank)


_NEEDED_RECEIVE = {
    ActionKind.FORWARD: ActionKind.RECEIVE_FORWARD,
    ActionKind.BACKWARD: ActionKind.RECEIVE_BACKWARD,
    ActionKind.INPUT_GRADIENT: ActionKind.RECEIVE_BACKWARD,
}
"""The receive that a computation waits for, if its input comes from another rank."""


def _with_messages(
    schedule: Schedule, rank: int, actions: Sequence[Action], incoming: dict[int, list[Action]]
) -> Iterator[Action]:
    messages: dict[tuple[ActionKind | None, int, int], tuple[int, int]] = {
        (receive.kind, receive.micro_batch, receive.chunk): (peer, number)
        for peer, receives in incoming.items()
        for number, receive in enumerate(receives)
    }
    forwards = {(a.micro_batch, a.chunk): step for step, a in enumerate(actions) if a.kind is ActionKind.FORWARD}
    posted: dict[int, int] = defaultdict(int)
    handled = 0
    for step, action in enumerate(actions):
        while handled < len(actions) and handled <= step + schedule.ahead:
            needs = actions[handled]
            key = _NEEDED_RECEIVE.get(needs.kind), needs.micro_batch, needs.chunk
            peer, last = messages.get(key, (rank, -1))
            due = incoming[peer][posted[peer] : last + 1]
            # The receive of a gradient is posted after its forward, which determines the gradient's shape.
            if any(r.kind is ActionKind.RECEIVE_BACKWARD and forwards[r.micro_batch, r.chunk] >= step for r in due):
                break
            yield from due
            posted[peer] = max(posted[peer], last + 1)
            handled += 1
        yield action
        yield from _sends_after(schedule.pipeline, rank, action)


def _with_sync(actions: Iterator[Action]) -> list[Action]:
    """Returns the actions with a SYNC before the last computation of gradients of each chunk."""
    result = list(actions)
    last = {
        action.chunk: (step, action.micro_batch)
        for step, action in enumerate(result)
        if action.kind in COMPUTES - {ActionKind.FORWARD}
    }
    for chunk, (step, micro_batch) in sorted(last.items(), key=lambda item: -item[1][0]):
        result.insert(step, Action(ActionKind.SYNC, micro_batch, chunk))
    return result
