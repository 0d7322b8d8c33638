"""Simulates the action lists of ranks: computes when each computation starts and ends, how long ranks wait, and how
many activations they keep.

The simulator executes the same lists as the runner, under the same rules: a send does not wait, messages from one rank
to another arrive in order, a computation waits for the message that it needs.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.action_lists import all_rank_actions
from megatron.core.pipeline_parallel.actions import COMPUTES, RECEIVES, SENDS, Action, ActionKind
from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.p2p_communication import max_sends_in_flight
from megatron.core.pipeline_parallel.stages import Pipeline


@dataclass(frozen=True)
class Costs:
    """The duration of each computation of one chunk, in any unit."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    message: float = 0.0
    """Time from the end of a computation until another rank has received its result."""

    def duration(self, action: Action) -> float:
        """Returns the duration of a computation."""
        kinds = {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: self.input_gradient + self.weight_gradient,
            ActionKind.INPUT_GRADIENT: self.input_gradient,
            ActionKind.WEIGHT_GRADIENT: self.weight_gradient,
        }
        return kinds[action.kind]


@dataclass(frozen=True)
class TimedAction:
    """A computation with its start and end."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """The computations of all ranks over time."""

    spans: tuple[tuple[TimedAction, ...], ...]
    """The computations of each rank, in order."""
    pipeline: Pipeline

    @property
    def length(self) -> float:
        """Time from the start of the first computation to the end of the last one."""
        return max((span.stop for spans in self.spans for span in spans), default=0.0)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they wait."""
        busy = sum(span.stop - span.start for spans in self.spans for span in spans)
        return 1.0 - busy / (self.length * len(self.spans)) if busy else 0.0

    def peak_activations(self, rank: int) -> float:
        """Returns the largest amount of activations that a rank keeps at once. The unit is one micro-batch through all
        chunks of the rank.

        A micro-batch in a chunk counts from its forward to the end of its backward, or of its weight gradients if those
        are deferred. This is an upper bound: while weight gradients are deferred, only the factors of their products
        are kept.
        """
        kept = peak = 0
        for span in self.spans[rank]:
            kept += span.action.kind is ActionKind.FORWARD
            peak = max(peak, kept)
            kept -= span.action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
        return peak / self.pipeline.chunks


def simulate(schedule: Schedule, costs: Costs | Sequence[Costs] | None = None) -> Timeline:
    """Returns the timeline of a schedule. `costs` are those of all stages, or one entry for each stage. Raises
    RuntimeError, naming the waiting ranks and actions, if it gets stuck."""
    return simulate_actions(all_rank_actions(schedule), schedule.pipeline, costs)


def simulate_actions(
    lists: Sequence[Sequence[Action]],
    pipeline: Pipeline,
    costs: Costs | Sequence[Costs] | None = None,
    bound: int | None = None,
) -> Timeline:
    """Returns the timeline of any action lists, one per rank. Checks that each receive gets the message it expects.

    `bound` is the number of sends to one rank that may lack a posted receive; the next send waits. None: the bound of
    the runner. Raises RuntimeError if the ranks wait for each other.
    """
    if costs is None or isinstance(costs, Costs):
        costs = [costs or Costs()] * pipeline.num_stages
    return _Simulation(lists, pipeline, costs, max_sends_in_flight(pipeline) if bound is None else bound).run()


ComputationKey = tuple[ActionKind, int, int]
"""ActionKind, micro-batch, chunk."""


class _Rank:
    """The progress of one rank."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions, self.next, self.time = actions, 0, 0.0
        self.spans: list[TimedAction] = []
        self.done: dict[ComputationKey, float] = {}
        self.receives: dict[ComputationKey, tuple[int, int]] = {}
        """The sender of each posted receive, and the number of the message among those of this sender."""
        self.posted: dict[int, int] = defaultdict(int)

    @property
    def is_done(self) -> bool:
        return self.next == len(self.actions)


class _Simulation:
    def __init__(
        self, lists: Sequence[Sequence[Action]], pipeline: Pipeline, costs: Sequence[Costs], bound: int
    ) -> None:
        self.pipeline, self.costs, self.bound = pipeline, costs, bound
        self.ranks = [_Rank(actions) for actions in lists]
        self.messages: dict[tuple[int, int], list[tuple[Action, float]]] = defaultdict(list)
        """The messages from one rank to another, and the time at which each arrives."""

    def run(self) -> Timeline:
        steps = dict.fromkeys(COMPUTES, self._compute)
        steps |= dict.fromkeys(SENDS, self._send) | dict.fromkeys(RECEIVES, self._receive)
        moved = True
        while moved:
            moved = False
            for number, rank in enumerate(self.ranks):
                while not rank.is_done and (
                    rank.actions[rank.next].kind is ActionKind.SYNC
                    or steps[rank.actions[rank.next].kind](number, rank, rank.actions[rank.next])
                ):
                    rank.next += 1
                    moved = True
        stuck = {number: str(rank.actions[rank.next]) for number, rank in enumerate(self.ranks) if not rank.is_done}
        if stuck:
            raise RuntimeError(f"the ranks wait for each other, each at its next action: {stuck}")
        for number, rank in enumerate(self.ranks):
            for peer in range(len(self.ranks)):
                assert rank.posted[peer] == len(self.messages[peer, number]), (
                    f"rank {number} does not receive all messages of rank {peer}"
                )
        return Timeline(tuple(tuple(rank.spans) for rank in self.ranks), self.pipeline)

    def _costs_of(self, number: int, action: Action) -> Costs:
        """Returns the costs of the stage of an action."""
        return self.costs[self.pipeline.stage_index(number, action.chunk)]

    def _send(self, number: int, rank: _Rank, action: Action) -> bool:
        assert action.peer is not None
        sent = self.messages[number, action.peer]
        if len(sent) - self.ranks[action.peer].posted[number] >= self.bound:
            return False
        sent.append((action, rank.time + self._costs_of(number, action).message))
        return True

    def _receive(self, number: int, rank: _Rank, action: Action) -> bool:
        assert action.peer is not None
        rank.receives[action.kind, action.micro_batch, action.chunk] = action.peer, rank.posted[action.peer]
        rank.posted[action.peer] += 1
        return True

    def _compute(self, number: int, rank: _Rank, action: Action) -> bool:
        ready = self._ready(number, rank, action)
        if ready is None:
            return False
        start = max(rank.time, ready)
        rank.time = start + self._costs_of(number, action).duration(action)
        key = action.kind, action.micro_batch, action.chunk
        assert key not in rank.done, f"rank {number} does {action} twice"
        rank.done[key] = rank.time
        rank.spans.append(TimedAction(action, start, rank.time))
        return True

    def _ready(self, number: int, rank: _Rank, action: Action) -> float | None:
        """Returns the time at which the inputs of a computation have arrived; None if they have not been sent yet."""
        batch, chunk = action.micro_batch, action.chunk
        stage = self.pipeline.stage_index(number, chunk)
        if action.kind is ActionKind.WEIGHT_GRADIENT:
            return rank.done[ActionKind.INPUT_GRADIENT, batch, chunk]
        if action.kind is ActionKind.FORWARD:
            source, made_by, receive = stage - 1, {ActionKind.FORWARD}, ActionKind.RECEIVE_FORWARD
        else:
            assert (ActionKind.FORWARD, batch, chunk) in rank.done, f"rank {number} does {action} before its forward"
            source, made_by, receive = (
                stage + 1,
                {ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT},
                ActionKind.RECEIVE_BACKWARD,
            )
        if not 0 <= source < self.pipeline.num_stages:
            return 0.0
        peer, peer_chunk = self.pipeline.locate(source)
        if peer == number:
            times = [rank.done[kind, batch, peer_chunk] for kind in made_by if (kind, batch, peer_chunk) in rank.done]
            assert times, f"rank {number} does {action} before its own computation that this needs"
            return times[0]
        assert (receive, batch, chunk) in rank.receives, f"rank {number} does {action}, but posted no receive for it"
        sender, index = rank.receives[receive, batch, chunk]
        assert sender == peer, f"{action} of rank {number} listens to rank {sender}, not {peer}"
        if index >= len(self.messages[peer, number]):
            return None
        sent, arrives = self.messages[peer, number][index]
        expected = ActionKind.SEND_FORWARD if receive is ActionKind.RECEIVE_FORWARD else ActionKind.SEND_BACKWARD
        assert (sent.kind, sent.micro_batch, sent.chunk) == (expected, batch, peer_chunk), (
            f"{action} of rank {number} receives {sent} of rank {peer}"
        )
        return arrives
