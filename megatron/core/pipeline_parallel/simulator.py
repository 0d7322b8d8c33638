"""Plays the ranks' lists of actions through: when each computation begins and ends, what waits, what is held.

The lists are those that the runner executes, exchanges included, under the same rules: a send is posted and forgotten,
messages from one rank to another arrive in order, a computation waits for the message that it needs.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.action_lists import lists_of
from megatron.core.pipeline_parallel.actions import COMPUTES, RECEIVES, SENDS, Action, Kind
from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.p2p_communication import max_sends_in_flight
from megatron.core.pipeline_parallel.stages import Pipeline


@dataclass(frozen=True)
class Costs:
    """How long each computation of one chunk takes, in any unit, the same on all stages."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    message: float = 0.0
    """From the end of a computation until its result has arrived elsewhere."""

    def of(self, action: Action) -> float:
        """A pair takes as long as its parts in a row: what it hides is not in these numbers."""
        kinds = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.input_gradient + self.weight_gradient,
            Kind.INPUT_GRADIENT: self.input_gradient,
            Kind.WEIGHT_GRADIENT: self.weight_gradient,
        }
        return sum(kinds[part.kind] for part in action.parts)


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
            kinds = {part.kind for part in span.action.parts}
            held += Kind.FORWARD in kinds
            peak = max(peak, held)
            held -= bool(kinds & releases)
        return peak / self.pipeline.chunks


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Play a schedule through. Raises RuntimeError, saying who waits for what, where it gets stuck."""
    return play(lists_of(schedule), schedule.pipeline, costs)


def play(
    lists: Sequence[Sequence[Action]], pipeline: Pipeline, costs: Costs | None = None, bound: int | None = None
) -> Timeline:
    """Play any lists through, one a rank; checks that every receive meets the send that it is meant for.

    `bound`: sends to one rank that may be without a posted receive before the next is held up, the runner's if None.
    """
    return _Play(
        lists, pipeline, costs or Costs(), max_sends_in_flight(pipeline) if bound is None else bound
    ).to_the_end()


Key = tuple[Kind, int, int]
"""Kind, micro-batch, chunk."""


class _Rank:
    """How far one rank is."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions, self.next, self.time = actions, 0, 0.0
        self.spans: list[Span] = []
        self.done: dict[Key, float] = {}
        self.receives: dict[Key, tuple[int, int]] = {}
        """From whom a posted receive gets which of its messages."""
        self.posted: dict[int, int] = defaultdict(int)

    @property
    def is_done(self) -> bool:
        return self.next == len(self.actions)


class _Play:
    def __init__(self, lists: Sequence[Sequence[Action]], pipeline: Pipeline, costs: Costs, bound: int) -> None:
        self.pipeline, self.costs, self.bound = pipeline, costs, bound
        self.ranks = [_Rank(actions) for actions in lists]
        self.mail: dict[tuple[int, int], list[tuple[Action, float]]] = defaultdict(list)
        """What one rank sent another, and when it arrives."""

    def to_the_end(self) -> Timeline:
        steps = dict.fromkeys(COMPUTES, self._compute)
        steps |= dict.fromkeys(SENDS, self._send) | dict.fromkeys(RECEIVES, self._receive)
        moved = True
        while moved:
            moved = False
            for number, rank in enumerate(self.ranks):
                while not rank.is_done and (
                    rank.actions[rank.next].kind is Kind.SYNC
                    or steps[rank.actions[rank.next].kind](number, rank, rank.actions[rank.next])
                ):
                    rank.next += 1
                    moved = True
        stuck = {number: str(rank.actions[rank.next]) for number, rank in enumerate(self.ranks) if not rank.is_done}
        if stuck:
            raise RuntimeError(f"the ranks wait for each other, each at its next action: {stuck}")
        for number, rank in enumerate(self.ranks):
            for peer in range(len(self.ranks)):
                assert rank.posted[peer] == len(self.mail[peer, number]), f"rank {number} leaves mail of rank {peer}"
        return Timeline(tuple(tuple(rank.spans) for rank in self.ranks), self.pipeline)

    def _send(self, number: int, rank: _Rank, action: Action) -> bool:
        assert action.peer is not None
        sent = self.mail[number, action.peer]
        if len(sent) - self.ranks[action.peer].posted[number] >= self.bound:
            return False
        sent.append((action, rank.time + self.costs.message))
        return True

    def _receive(self, number: int, rank: _Rank, action: Action) -> bool:
        assert action.peer is not None
        rank.receives[action.kind, action.micro_batch, action.chunk] = action.peer, rank.posted[action.peer]
        rank.posted[action.peer] += 1
        return True

    def _compute(self, number: int, rank: _Rank, action: Action) -> bool:
        ready = [self._ready(number, rank, part) for part in action.parts]
        if None in ready:
            return False
        start = max(rank.time, *(time for time in ready if time is not None))
        rank.time = start + self.costs.of(action)
        for part in action.parts:
            key = part.kind, part.micro_batch, part.chunk
            assert key not in rank.done, f"rank {number} does {part} twice"
            rank.done[key] = rank.time
        rank.spans.append(Span(action, start, rank.time))
        return True

    def _ready(self, number: int, rank: _Rank, action: Action) -> float | None:
        """When all that a computation needs is there; None: not yet."""
        batch, chunk = action.micro_batch, action.chunk
        stage = self.pipeline.stage(number, chunk)
        if action.kind is Kind.WEIGHT_GRADIENT:
            return rank.done[Kind.INPUT_GRADIENT, batch, chunk]
        if action.kind is Kind.FORWARD:
            source, made_by, receive = stage - 1, {Kind.FORWARD}, Kind.RECEIVE_FORWARD
        else:
            assert (Kind.FORWARD, batch, chunk) in rank.done, f"rank {number} does {action} before its forward"
            source, made_by, receive = stage + 1, {Kind.BACKWARD, Kind.INPUT_GRADIENT}, Kind.RECEIVE_BACKWARD
        if not 0 <= source < self.pipeline.num_stages:
            return 0.0
        peer, peer_chunk = self.pipeline.place(source)
        if peer == number:
            times = [rank.done[kind, batch, peer_chunk] for kind in made_by if (kind, batch, peer_chunk) in rank.done]
            assert times, f"rank {number} does {action} before its own part that this needs"
            return times[0]
        assert (receive, batch, chunk) in rank.receives, f"rank {number} does {action}, but posted no receive for it"
        sender, place = rank.receives[receive, batch, chunk]
        assert sender == peer, f"{action} of rank {number} listens to rank {sender}, not {peer}"
        if place >= len(self.mail[peer, number]):
            return None
        sent, arrives = self.mail[peer, number][place]
        expected = Kind.SEND_FORWARD if receive is Kind.RECEIVE_FORWARD else Kind.SEND_BACKWARD
        assert (sent.kind, sent.micro_batch, sent.chunk) == (expected, batch, peer_chunk), (
            f"{action} of rank {number} is given {sent} of rank {peer}"
        )
        return arrives
