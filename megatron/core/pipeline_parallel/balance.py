"""How many layers each stage gets so that no rank has much more to do than the others."""

import itertools
from collections.abc import Sequence

from megatron.core.pipeline_parallel.stages import Pipeline


def balanced_counts(layers: Sequence[int], first: int, last: int, pipeline: Pipeline) -> list[int]:
    """Numbers of consecutive layers, one for each stage.

    `layers`: the cost of each layer, in any unit; `first` and `last`: what the first and last stage have beside layers.
    The most loaded rank is the slowest and all wait for it, so its load comes first; then the loads of all ranks, then
    of all stages, are brought as near to each other as moving single layers can. With layers of one cost that is the
    best there is.
    """
    until = [0, *itertools.accumulate(layers)]
    ranks = [pipeline.place(stage)[0] for stage in range(pipeline.num_stages)]

    def loads_of(counts: Sequence[int]) -> tuple[int, int, int]:
        ends = list(itertools.accumulate(counts))
        stages = [until[end] - until[end - count] for end, count in zip(ends, counts, strict=True)]
        stages[0] += first
        stages[-1] += last
        of_ranks = [0] * pipeline.pipeline_size
        for rank, load in zip(ranks, stages, strict=True):
            of_ranks[rank] += load
        return max(of_ranks), sum(load * load for load in of_ranks), sum(load * load for load in stages)

    counts = _by_share(until, first, last, pipeline.num_stages)
    loads = loads_of(counts)
    while True:
        better = min(((loads_of(moved), moved) for moved in _moves(counts)), default=(loads, counts))
        if better[0] >= loads:
            return counts
        loads, counts = better


def _by_share(until: Sequence[int], first: int, last: int, stages: int) -> list[int]:
    """A start: each stage ends where its share of all costs does."""
    total = first + until[-1] + last
    ends = [sum(first + cost <= total * (stage + 1) // stages for cost in until[1:]) for stage in range(stages - 1)]
    return [stop - start for start, stop in itertools.pairwise([0, *ends, len(until) - 1])]


def _moves(counts: list[int]) -> list[list[int]]:
    """Every way of taking a layer from one stage and giving one to another; those between are shifted."""
    moves = []
    for giver, taker in itertools.permutations(range(len(counts)), 2):
        if counts[giver]:
            moved = list(counts)
            moved[giver] -= 1
            moved[taker] += 1
            moves.append(moved)
    return moves
