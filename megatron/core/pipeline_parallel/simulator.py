"""Plays the ranks' lists of actions through: when each computation begins and ends, what waits, what is held.

The lists are those that the runner executes, exchanges included, under the same rules: a send is posted and forgotten,
messages from one rank to another arrive in order, a computation waits for the message that it needs.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.orders import COMPUTES, RECEIVES, SENDS, Action, Kind, Schedule, lists_of
from megatron.core.pipeline_parallel.stages import Pipeline


@dataclass(frozen=True)
class Costs:
    """How long each computation of one chunk takes, in any unit."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    message: float = 0.0
    """From the end of a computation until its result has arrived elsewhere."""

    def of(self, kind: Kind) -> float:
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.input_gradient + self.weight_gradient,
            Kind.INPUT_GRADIENT: self.input_gradient,
            Kind.WEIGHT_GRADIENT: self.weight_gradient,
        }[kind]


@dataclass(frozen=True)
class Span:
    """A computation in time."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """What each rank computed when."""

    spans: tuple[tuple[Span, ...], ...]
    """By rank, in order."""
    pipeline: Pipeline

    @property
    def length(self) -> float:
        """From the first computation's start to the last one's end."""
        return max((span.stop for spans in self.spans for span in spans), default=0.0)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they wait."""
        busy = sum(span.stop - span.start for spans in self.spans for span in spans)
        return 1.0 - busy / (self.length * len(self.spans)) if busy else 0.0

    def peak_activations(self, rank: int) -> float:
        """The most that a rank holds at once, in micro-batches of a rank's whole share of the model.

        A chunk of a micro-batch counts from its forward to the end of its backward, of its weight gradients where those
        come by themselves (an upper bound: of what is put off, only the inputs of products are kept).
        """
        held = peak = 0
        releases = {Kind.BACKWARD, Kind.WEIGHT_GRADIENT}
        for span in self.spans[rank]:
            held += (span.action.kind is Kind.FORWARD) - (span.action.kind in releases)
            peak = max(peak, held + (span.action.kind in releases))
        return peak / self.pipeline.chunks


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Play a schedule through. Raises RuntimeError, saying who waits for what, where it gets stuck."""
    return play(lists_of(schedule), schedule.pipeline, costs or Costs())


def play(lists: Sequence[Sequence[Action]], pipeline: Pipeline, costs: Costs) -> Timeline:
    """Play any lists through, one a rank; checks that every receive meets the send it is meant for."""
    ranks = [_Rank(rank, actions) for rank, actions in enumerate(lists)]
    mail: Mapping[tuple[int, int], list[tuple[Action, float]]] = defaultdict(list)
    while any(rank.place < len(rank.actions) for rank in ranks):
        before = [rank.place for rank in ranks]
        for rank in ranks:
            while rank.place < len(rank.actions) and _step(rank, pipeline, costs, mail):
                rank.place += 1
        if [rank.place for rank in ranks] == before:
            waiting = {rank.rank: str(rank.actions[rank.place]) for rank in ranks if rank.place < len(rank.actions)}
            raise RuntimeError(f"the ranks wait for each other: {waiting}")
    return Timeline(tuple(tuple(rank.spans) for rank in ranks), pipeline)


class _Rank:
    def __init__(self, rank: int, actions: Sequence[Action]) -> None:
        self.rank, self.actions, self.place, self.time = rank, actions, 0, 0.0
        self.spans: list[Span] = []
        self.posted: dict[tuple[Kind, int, int], tuple[int, int]] = {}
        """Where in the mail of which peer a posted receive will find its message."""
        self.counts: dict[int, int] = defaultdict(int)
        self.done: dict[tuple[Kind, int, int], float] = {}


def _step(
    rank: _Rank, pipeline: Pipeline, costs: Costs, mail: Mapping[tuple[int, int], list[tuple[Action, float]]]
) -> bool:
    """Do the rank's next action; False: what it needs is not there yet."""
    action = rank.actions[rank.place]
    if action.kind in SENDS:
        assert action.peer is not None
        mail[rank.rank, action.peer].append((action, rank.time + costs.message))
    elif action.kind in RECEIVES:
        assert action.peer is not None
        rank.posted[action.kind, action.micro_batch, action.chunk] = action.peer, rank.counts[action.peer]
        rank.counts[action.peer] += 1
    elif action.kind in COMPUTES:
        ready = _ready(rank, action, pipeline, mail)
        if ready is None:
            return False
        start = max(rank.time, ready)
        rank.time = start + costs.of(action.kind)
        rank.spans.append(Span(action, start, rank.time))
        key = action.kind, action.micro_batch, action.chunk
        assert key not in rank.done, f"{action} is done twice on rank {rank.rank}"
        rank.done[key] = rank.time
    return True


def _ready(
    rank: _Rank, action: Action, pipeline: Pipeline, mail: Mapping[tuple[int, int], list[tuple[Action, float]]]
) -> float | None:
    """When all that a computation needs is there; None: not yet."""
    number, chunk = action.micro_batch, action.chunk
    stage = pipeline.stage(rank.rank, chunk)
    if action.kind is Kind.WEIGHT_GRADIENT:
        return rank.done[Kind.INPUT_GRADIENT, number, chunk]
    if action.kind is Kind.FORWARD:
        source, kinds, receive = stage - 1, (Kind.FORWARD,), Kind.RECEIVE_FORWARD
    else:
        assert (Kind.FORWARD, number, chunk) in rank.done, f"{action} comes before its forward on rank {rank.rank}"
        source, kinds, receive = stage + 1, (Kind.BACKWARD, Kind.INPUT_GRADIENT), Kind.RECEIVE_BACKWARD
    if not 0 <= source < pipeline.num_stages:
        return 0.0
    peer, peer_chunk = pipeline.place(source)
    if peer == rank.rank:
        times = [rank.done[kind, number, peer_chunk] for kind in kinds if (kind, number, peer_chunk) in rank.done]
        assert times, f"{action} comes before what it needs of rank {rank.rank} itself"
        return times[0]
    found_peer, place = rank.posted[receive, number, chunk]
    assert found_peer == peer, f"{action} of rank {rank.rank} listens to {found_peer}, not {peer}"
    if place >= len(mail[peer, rank.rank]):
        return None
    sent, arrived = mail[peer, rank.rank][place]
    expected = Kind.SEND_FORWARD if receive is Kind.RECEIVE_FORWARD else Kind.SEND_BACKWARD
    assert (sent.kind, sent.micro_batch, sent.chunk) == (expected, number, peer_chunk), (
        f"{action} of rank {rank.rank} is given {sent} of rank {peer}"
    )
    return arrived
