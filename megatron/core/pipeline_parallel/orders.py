"""The order in which each rank of a pipeline computes: one pure function per schedule.

`action_lists` adds the communication with other ranks to these orders.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatron.core.pipeline_parallel.actions import Action, ActionKind
from megatron.core.pipeline_parallel.stages import Pipeline

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
"""Names of the schedules, as in `--pipeline-schedule`."""


@dataclass(frozen=True)
class Schedule:
    """The settings that determine the action lists of a pipeline's ranks."""

    name: str
    """One of `SCHEDULES`."""
    pipeline: Pipeline
    num_microbatches: int
    forward_only: bool = False
    group_size: int | None = None
    """Interleaved schedule: number of micro-batches that a chunk runs in a row; None: as many as there are pipeline
    ranks."""
    ahead: int = 1
    """A receive is posted this many computations before the computation that needs it."""

    def __post_init__(self) -> None:
        assert self.name in SCHEDULES and (self.name == "zb-v") == self.pipeline.v_shaped, self
        assert self.pipeline.chunks == 1 or self.name in ("interleaved", "zb-v"), self


def one_forward_one_backward(size: int, count: int, rank: int) -> Iterator[Action]:
    """Yields the order of 1F1B (Narayanan et al. 2019, PipeDream; 2021, arXiv:2104.04473) for `count` micro-batches.

    At most `size - rank` micro-batches are in flight.
    """
    warmup = min(count, size - rank - 1)
    for number in range(count + warmup):
        if number < count:
            yield Action(ActionKind.FORWARD, number)
        if number >= warmup:
            yield Action(ActionKind.BACKWARD, number - warmup)


def zero_bubble_h1(size: int, count: int, rank: int) -> Iterator[Action]:
    """Yields the order of ZB-H1 (Qi et al. 2023, arXiv:2401.10241): 1F1B with weight gradients deferred into its
    bubbles.

    Rank r defers the weight gradients of r micro-batches. Rank r also keeps the `size - r` micro-batches whose backward
    has not come yet. So every rank keeps as much as the first rank of 1F1B.
    """
    next_weight = 0
    for action in one_forward_one_backward(size, count, rank):
        if action.kind is ActionKind.FORWARD:
            yield action
            continue
        yield Action(ActionKind.INPUT_GRADIENT, action.micro_batch)
        if action.micro_batch >= rank:
            yield Action(ActionKind.WEIGHT_GRADIENT, next_weight)
            next_weight += 1
    for number in range(next_weight, count):
        yield Action(ActionKind.WEIGHT_GRADIENT, number)


def interleaved(pipeline: Pipeline, count: int, rank: int, group_size: int) -> Iterator[Action]:
    """Yields the order of interleaved 1F1B with several chunks per rank (Narayanan et al. 2021, arXiv:2104.04473).

    Groups of micro-batches pass through one chunk after the other. So the pipeline fills and drains in the time of one
    chunk per rank, instead of the time of all layers of a rank.

    If the last group is not full, the order is that of full groups without the missing micro-batches. A small group
    alone would leave a chunk before the group ahead of it has left the pipeline, and ranks would wait for each other.
    """
    assert group_size >= pipeline.pipeline_size, (pipeline, group_size)
    full = -(-count // group_size) * group_size
    forwards = list(_by_groups(ActionKind.FORWARD, pipeline.chunks, full, group_size))
    backwards = list(_by_groups(ActionKind.BACKWARD, pipeline.chunks, full, group_size))
    warmup = 2 * (pipeline.pipeline_size - rank - 1) + (pipeline.chunks - 1) * group_size
    warmup = min(warmup, len(forwards))
    for action in forwards[:warmup]:
        if action.micro_batch < count:
            yield action
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield from (action for action in (forward, backward) if action.micro_batch < count)
    for action in backwards[len(forwards) - warmup :]:
        if action.micro_batch < count:
            yield action


def _by_groups(kind: ActionKind, chunks: int, count: int, group_size: int) -> Iterator[Action]:
    """Yields actions group by group; each group passes through all chunks before the next group starts."""
    for first in range(0, count, group_size):
        for chunk in range(chunks) if kind is ActionKind.FORWARD else reversed(range(chunks)):
            for number in range(first, min(first + group_size, count)):
                yield Action(kind, number, chunk)


def zero_bubble_v(pipeline: Pipeline, count: int, forward_only: bool = False) -> list[list[Action]]:
    """Returns the orders of all ranks of ZB-V (Qi et al. 2023, arXiv:2401.10241), where micro-batches pass down the
    ranks and back.

    The order comes from a simulation in ticks, in which each computation takes one tick. In every tick each rank takes
    the first action that is possible, in this order: forward of its second chunk, input gradients (second chunk first),
    forward of its first chunk, weight gradients. No rank keeps the activations of more than 2 * size chunks of
    micro-batches, as many as the first rank of 1F1B keeps; by then the first micro-batch that a rank sent down the
    ranks has come back.
    """
    size, last = pipeline.pipeline_size, pipeline.num_stages - 1
    bound = 2 * size
    order: list[list[Action]] = [[] for _ in range(size)]
    # Micro-batches keep their order on every stage, so a count says which ones are done.
    forward, inputs, weights = [0] * (last + 1), [0] * (last + 1), [0] * (last + 1)
    done = {ActionKind.FORWARD: forward, ActionKind.INPUT_GRADIENT: inputs, ActionKind.WEIGHT_GRADIENT: weights}
    remaining = (count if forward_only else 3 * count) * (last + 1)
    preferences = (
        (ActionKind.FORWARD, 1),
        (ActionKind.INPUT_GRADIENT, 1),
        (ActionKind.INPUT_GRADIENT, 0),
        (ActionKind.FORWARD, 0),
        (ActionKind.WEIGHT_GRADIENT, 1),
        (ActionKind.WEIGHT_GRADIENT, 0),
    )[:: 3 if forward_only else 1]

    def is_possible(rank: int, kind: ActionKind, chunk: int) -> bool:
        stage = pipeline.stage_index(rank, chunk)
        if kind is ActionKind.FORWARD:
            in_flight = sum(forward[s] - weights[s] for s in (rank, last - rank))
            arrived = count if stage == 0 else forward[stage - 1]
            return forward[stage] < arrived and (forward_only or in_flight < bound)
        if kind is ActionKind.INPUT_GRADIENT:
            return inputs[stage] < (forward[stage] if stage == last else min(forward[stage], inputs[stage + 1]))
        return weights[stage] < inputs[stage]

    while remaining:
        # All ranks choose from what was done before this tick.
        chosen = [next((choice for choice in preferences if is_possible(rank, *choice)), None) for rank in range(size)]
        for rank, choice in enumerate(chosen):
            if choice is not None:
                kind, chunk = choice
                stage = pipeline.stage_index(rank, chunk)
                order[rank].append(Action(kind, done[kind][stage], chunk))
                done[kind][stage] += 1
                remaining -= 1
        assert any(chosen), "no rank can continue"
    return order


ONE_CHUNK_ORDERS: Mapping[str, Callable[[int, int, int], Iterable[Action]]] = {
    "1f1b": one_forward_one_backward,
    "zb-h1": zero_bubble_h1,
}
"""Schedules with one model chunk on each rank: the order of (number of ranks, number of micro-batches, rank)."""


def compute_orders(schedule: Schedule) -> list[list[Action]]:
    """Returns the computations of each rank, in order."""
    pipeline, count = schedule.pipeline, schedule.num_microbatches
    ranks = range(pipeline.pipeline_size)
    group = schedule.group_size or pipeline.pipeline_size
    if pipeline.v_shaped:
        return zero_bubble_v(pipeline, count, schedule.forward_only)
    if schedule.forward_only:
        return [list(_by_groups(ActionKind.FORWARD, pipeline.chunks, count, group)) for _ in ranks]
    if schedule.name == "interleaved":
        return [list(interleaved(pipeline, count, rank, group)) for rank in ranks]
    order = ONE_CHUNK_ORDERS[schedule.name]
    return [list(order(pipeline.pipeline_size, count, rank)) for rank in ranks]


def schedule_name(requested: str | None, pipeline: Pipeline) -> str:
    """Returns the schedule of a config: the requested one if it fits the pipeline, else the one that does."""
    if pipeline.v_shaped:
        return "zb-v"
    if pipeline.chunks > 1:
        return "interleaved"
    return requested if requested is not None and requested in ONE_CHUNK_ORDERS else "1f1b"
