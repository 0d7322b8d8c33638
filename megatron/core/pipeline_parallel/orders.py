"""In which order each rank of a pipeline computes: a pure function for each schedule.

What a rank does beside computing, its exchange with other ranks, follows from these orders (`action_lists`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.pipeline_parallel.actions import Action, Kind, pair
from megatron.core.pipeline_parallel.stages import Pipeline

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
    pairs: bool = False
    """One stage, or interleaved: where a forward and a backward come one after the other, they take turns."""

    def __post_init__(self) -> None:
        assert not self.pairs or self.pipeline.num_stages == 1 or self.name == "interleaved", self
        assert self.name in SCHEDULES and (self.name == "zb-v") == self.pipeline.v_shaped, self
        assert self.pipeline.chunks == 1 or self.name in ("interleaved", "zb-v"), self


def one_forward_one_backward(size: int, count: int, rank: int) -> Iterator[Action]:
    """1F1B (Narayanan et al. 2019, PipeDream; 2021, arXiv:2104.04473): at most `size - rank` in flight."""
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


def interleaved(pipeline: Pipeline, count: int, rank: int, group_size: int, pairs: bool = False) -> Iterator[Action]:
    """Several chunks a rank (Narayanan et al. 2021, arXiv:2104.04473): groups of micro-batches go through chunk after
    chunk, so that the pipeline fills and drains in the time of a chunk, not of a rank's whole share.

    Where the last group is not full, what it lacks is left out of the order of full groups: a small group by itself
    would be through a chunk before the group ahead of it has left the pipeline, and ranks would wait for each other.

    With `pairs` every rank goes forward once more before its first backward: the last stage's backward is then of the
    micro-batch before the one whose forward it takes turns with. All that a rank holds more is a chunk's activations.
    """
    assert group_size >= pipeline.pipeline_size, (pipeline, group_size)
    full = -(-count // group_size) * group_size
    forwards = list(_chunk_after_chunk(Kind.FORWARD, pipeline.chunks, full, group_size))
    backwards = list(_chunk_after_chunk(Kind.BACKWARD, pipeline.chunks, full, group_size))
    ahead = 2 * (pipeline.pipeline_size - rank - 1) + (pipeline.chunks - 1) * group_size + pairs
    ahead = min(ahead, len(forwards))
    for action in forwards[:ahead]:
        if action.micro_batch < count:
            yield action
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        there = [action for action in (forward, backward) if action.micro_batch < count]
        yield from [pair(forward, backward)] if pairs and len(there) == 2 else there
    for action in backwards[len(forwards) - ahead :]:
        if action.micro_batch < count:
            yield action


def _chunk_after_chunk(kind: Kind, chunks: int, count: int, group_size: int) -> Iterator[Action]:
    for first in range(0, count, group_size):
        for chunk in range(chunks) if kind is Kind.FORWARD else reversed(range(chunks)):
            for number in range(first, min(first + group_size, count)):
                yield Action(kind, number, chunk)


def v_shaped(pipeline: Pipeline, count: int, forward_only: bool = False) -> list[list[Action]]:
    """All ranks' orders where micro-batches go down the ranks and come back: ZB-V (Qi et al. 2023, arXiv:2401.10241).

    Found by playing it through in ticks, all computations taking one. A rank that is free takes the first it can of:
    bring a micro-batch back up, input gradients, send one down, weight gradients. No rank holds more than 2 * size
    micro-batches' chunks, which is as much as the first rank of 1F1B; the first that it sent down is back by then.
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
            return forward[stage] < arrived and (forward_only or held < bound)
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
    if schedule.name == "interleaved" or schedule.pairs:
        return [list(interleaved(pipeline, count, rank, group, schedule.pairs)) for rank in ranks]
    order = late_weight_gradients if schedule.name == "zb-h1" else one_forward_one_backward
    return [list(order(pipeline.pipeline_size, count, rank)) for rank in ranks]


def schedule_name(requested: str | None, pipeline: Pipeline) -> str:
    """The schedule of a config: what it asks for, or what fits its chunks."""
    if pipeline.v_shaped:
        return "zb-v"
    if pipeline.chunks > 1:
        return "interleaved"
    return requested if requested in ("1f1b", "zb-h1") else "1f1b"
