"""What a pipeline rank does in a step, as data: a list of actions that a test can read and a runner executes.

Pure functions of sizes. First each schedule says in which order a rank computes; `actions_of` puts the exchanges with
other ranks, and the moments from which gradients may be reduced, in between. Nothing here communicates.
"""

import enum
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.stages import Pipeline


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
    SYNC = "S"
    """From here on gradients of the chunk may be reduced: only its last micro-batch still adds to them."""


COMPUTES = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT})
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

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind.value}{self.micro_batch}{chunk}"


SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")


@dataclass(frozen=True)
class Schedule:
    """All that the lists of a pipeline's ranks depend on."""

    name: str
    """One of `SCHEDULES`."""
    pipeline: Pipeline
    num_microbatches: int
    forward_only: bool = False
    group_size: int | None = None
    """Interleaved: micro-batches that a chunk runs in a row; None: as many as ranks."""
    ahead: int = 1
    """How many computations before the one that needs it a receive is posted."""

    def __post_init__(self) -> None:
        assert self.name in SCHEDULES and (self.name == "zb-v") == self.pipeline.v_shaped, self
        assert self.pipeline.chunks == 1 or self.name in ("interleaved", "zb-v"), self


# ---------------------------------------------------------------------------------------------------------------------
# In which order a rank computes


def one_forward_one_backward(size: int, count: int, rank: int) -> Iterator[Action]:
    """1F1B (Narayanan et al. 2019, PipeDream; 2021, arXiv:2104.04473): at most `size - rank` micro-batches in flight."""
    ahead = min(count, size - rank - 1)
    for number in range(count + ahead):
        if number < count:
            yield Action(Kind.FORWARD, number)
        if number >= ahead:
            yield Action(Kind.BACKWARD, number - ahead)


def late_weight_gradients(size: int, count: int, rank: int) -> Iterator[Action]:
    """ZB-H1 (Qi et al. 2023, arXiv:2401.10241): 1F1B whose weight gradients fill its bubbles.

    Rank r puts off the products of r micro-batches; with the `size - r` whose backward is still to come it holds what
    the first rank of 1F1B holds.
    """
    late = 0
    for action in one_forward_one_backward(size, count, rank):
        if action.kind is Kind.FORWARD:
            yield action
            continue
        yield Action(Kind.INPUT_GRADIENT, action.micro_batch)
        if action.micro_batch >= rank:
            yield Action(Kind.WEIGHT_GRADIENT, late)
            late += 1
    for number in range(late, count):
        yield Action(Kind.WEIGHT_GRADIENT, number)


def interleaved(pipeline: Pipeline, count: int, rank: int, group_size: int) -> Iterator[Action]:
    """Several chunks a rank (Narayanan et al. 2021, arXiv:2104.04473): groups of micro-batches go through chunk after
    chunk, so that the pipeline fills and drains in the time of a chunk, not of a rank's whole share.

    Where the last group is not full, what it lacks is left out of the order of full groups: a small group by itself
    would be through a chunk before the group ahead of it has left the pipeline, and ranks would wait for each other.
    """
    assert group_size >= pipeline.pipeline_size, (pipeline, group_size)
    full = -(-count // group_size) * group_size
    forwards = list(_chunk_after_chunk(Kind.FORWARD, pipeline.chunks, full, group_size))
    backwards = list(_chunk_after_chunk(Kind.BACKWARD, pipeline.chunks, full, group_size))
    ahead = min(2 * (pipeline.pipeline_size - rank - 1) + (pipeline.chunks - 1) * group_size, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    order = [*forwards[:ahead], *(action for pair in pairs for action in pair), *backwards[len(forwards) - ahead :]]
    return (action for action in order if action.micro_batch < count)


def _chunk_after_chunk(kind: Kind, chunks: int, count: int, group_size: int) -> Iterator[Action]:
    for first in range(0, count, group_size):
        for chunk in range(chunks) if kind is Kind.FORWARD else reversed(range(chunks)):
            for number in range(first, min(first + group_size, count)):
                yield Action(kind, number, chunk)


def v_shaped(pipeline: Pipeline, count: int, forward_only: bool = False) -> list[list[Action]]:
    """All ranks' orders where a micro-batch goes down the ranks and comes back: ZB-V (Qi et al. 2023, arXiv:2401.10241).

    Found by playing it through in ticks, all computations taking one. A rank that is free takes the first it can of:
    bring a micro-batch back up, input gradients, send one down, weight gradients. No rank holds more than 2 * size
    micro-batches' chunks, that is as much as the first rank of 1F1B; one of the places is kept for those that come
    back, without whom none would ever leave.
    """
    size, last = pipeline.pipeline_size, pipeline.num_stages - 1
    bound = 2 * size
    order: list[list[Action]] = [[] for _ in range(size)]
    # Micro-batches keep their order on every stage, so that counts say which are done.
    forward, inputs, weights = [0] * (last + 1), [0] * (last + 1), [0] * (last + 1)
    done = {Kind.FORWARD: forward, Kind.INPUT_GRADIENT: inputs, Kind.WEIGHT_GRADIENT: weights}
    to_do = (count if forward_only else 3 * count) * (last + 1)
    wishes = (
        (Kind.FORWARD, 1),
        (Kind.INPUT_GRADIENT, 1),
        (Kind.INPUT_GRADIENT, 0),
        (Kind.FORWARD, 0),
        (Kind.WEIGHT_GRADIENT, 1),
        (Kind.WEIGHT_GRADIENT, 0),
    )[:: 3 if forward_only else 1]

    def can(rank: int, kind: Kind, chunk: int) -> bool:
        stage = pipeline.stage(rank, chunk)
        if kind is Kind.FORWARD:
            held = sum(forward[s] - weights[s] for s in (rank, last - rank))
            arrived = count if stage == 0 else forward[stage - 1]
            return forward[stage] < arrived and (forward_only or held < (bound if chunk else bound - 1))
        if kind is Kind.INPUT_GRADIENT:
            return inputs[stage] < (forward[stage] if stage == last else min(forward[stage], inputs[stage + 1]))
        return weights[stage] < inputs[stage]

    while to_do:
        # All choose by what was done before this tick.
        chosen = [next((wish for wish in wishes if can(rank, *wish)), None) for rank in range(size)]
        for rank, wish in enumerate(chosen):
            if wish is not None:
                kind, chunk = wish
                stage = pipeline.stage(rank, chunk)
                order[rank].append(Action(kind, done[kind][stage], chunk))
                done[kind][stage] += 1
                to_do -= 1
        assert any(chosen), "no rank can go on"
    return order


def computations(schedule: Schedule) -> list[list[Action]]:
    """What each rank computes, in order."""
    pipeline, count = schedule.pipeline, schedule.num_microbatches
    ranks = range(pipeline.pipeline_size)
    group = schedule.group_size or pipeline.pipeline_size
    if pipeline.v_shaped:
        return v_shaped(pipeline, count, schedule.forward_only)
    if schedule.forward_only:
        return [list(_chunk_after_chunk(Kind.FORWARD, pipeline.chunks, count, group)) for _ in ranks]
    if schedule.name == "interleaved":
        return [list(interleaved(pipeline, count, rank, group)) for rank in ranks]
    order = late_weight_gradients if schedule.name == "zb-h1" else one_forward_one_backward
    return [list(order(pipeline.pipeline_size, count, rank)) for rank in ranks]


def one_stage(num_microbatches: int, forward_only: bool = False) -> tuple[Action, ...]:
    """Without pipeline parallelism: each micro-batch forward and backward, one after the other."""
    return actions_of(Schedule("1f1b", Pipeline(1), num_microbatches, forward_only), 0)


# ---------------------------------------------------------------------------------------------------------------------
# What stands in between


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
    order = computations(schedule)
    mail = [defaultdict[int, list[Action]](list) for _ in order]  # [to][from]: what to receive, in order of sending
    for rank, actions in enumerate(order):
        for action in actions:
            sent = _sent(schedule.pipeline, rank, action)
            if sent is not None:
                assert sent.peer is not None
                mail[sent.peer][rank].append(_received(schedule.pipeline, rank, sent))
    return tuple(
        tuple(_with_sync(_with_exchange(schedule, rank, actions, mail[rank]))) for rank, actions in enumerate(order)
    )


def _sent(pipeline: Pipeline, rank: int, action: Action) -> Action | None:
    """The send that follows a computation."""
    stage = pipeline.stage(rank, action.chunk)
    if action.kind is Kind.FORWARD:
        kind, to = Kind.SEND_FORWARD, stage + 1
    elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
        kind, to = Kind.SEND_BACKWARD, stage - 1
    else:
        return None
    if not 0 <= to < pipeline.num_stages or pipeline.place(to)[0] == rank:
        return None
    return Action(kind, action.micro_batch, action.chunk, pipeline.place(to)[0])


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
    forwards = {(a.micro_batch, a.chunk): place for place, a in enumerate(actions) if a.kind is Kind.FORWARD}
    posted: dict[int, int] = defaultdict(int)
    looked = 0
    for place, action in enumerate(actions):
        while looked <= min(place + schedule.ahead, len(actions) - 1):
            coming = actions[looked]
            peer, last = found.get((_NEEDS.get(coming.kind), coming.micro_batch, coming.chunk), (rank, -1))
            due = mail[peer][posted[peer] : last + 1]
            # Nobody listens for a gradient before its forward, which says what the gradient looks like.
            early = (r for r in due if r.kind is Kind.RECEIVE_BACKWARD and forwards[r.micro_batch, r.chunk] >= place)
            if any(early):
                break
            yield from due
            posted[peer] = max(posted[peer], last + 1)
            looked += 1
        yield action
        sent = _sent(schedule.pipeline, rank, action)
        if sent is not None:
            yield sent


def _with_sync(actions: Iterator[Action]) -> list[Action]:
    """A SYNC before each chunk's last computation of gradients."""
    found = list(actions)
    last = {action.chunk: place for place, action in enumerate(found) if action.kind in COMPUTES - {Kind.FORWARD}}
    for chunk, place in sorted(last.items(), key=lambda item: -item[1]):
        found.insert(place, Action(Kind.SYNC, found[place].micro_batch, chunk))
    return found


def show(actions: Sequence[Action]) -> str:
    """One line: F0 B0 F1 S1 B1."""
    return " ".join(map(str, actions))


# ---------------------------------------------------------------------------------------------------------------------
# Which schedule a config asks for


def schedule_name(requested: str | None, pipeline: Pipeline) -> str:
    """The schedule of a config: what it asks for, or what fits its chunks."""
    if pipeline.v_shaped:
        return "zb-v"
    if pipeline.chunks > 1:
        return "interleaved"
    return requested if requested in ("1f1b", "zb-h1") else "1f1b"
