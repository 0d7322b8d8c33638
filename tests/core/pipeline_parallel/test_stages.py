"""On which rank a stage lies, and layers shared out so that no rank waits long for another."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from megatron.core.pipeline_parallel.stages import Pipeline, balanced_counts


def test_stages_lie_on_ranks_in_turn_or_as_a_v() -> None:
    turns = Pipeline(3, 2)
    assert [turns.locate(stage) for stage in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    v = Pipeline(3, 2, v_shaped=True)
    assert [v.locate(stage) for stage in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    assert (turns.loss_rank, v.loss_rank, v.embedding_rank) == (2, 0, 0)
    for pipeline in (turns, v):
        assert [pipeline.stage_index(*pipeline.locate(stage)) for stage in range(6)] == list(range(6))


def heaviest(layers: Sequence[int], counts: Sequence[int], first: int, last: int, pipeline: Pipeline) -> int:
    loads = [0] * pipeline.pipeline_size
    numbers = iter(layers)
    for stage, count in enumerate(counts):
        loads[pipeline.locate(stage)[0]] += sum(itertools.islice(numbers, count))
    loads[pipeline.embedding_rank] += first
    loads[pipeline.loss_rank] += last
    return max(loads)


def all_counts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for bars in itertools.combinations_with_replacement(range(layers + 1), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *bars, layers)))


@pytest.mark.parametrize("pipeline", [Pipeline(2), Pipeline(3), Pipeline(2, 2), Pipeline(2, 2, v_shaped=True)])
@pytest.mark.parametrize("last", [0, 7, 25, 90])
def test_the_heaviest_rank_is_as_light_as_can_be_with_layers_of_one_cost(pipeline: Pipeline, last: int) -> None:
    layers = [10] * 9
    counts = balanced_counts(layers, 1, last, pipeline)
    assert sum(counts) == 9 and len(counts) == pipeline.num_stages
    best = min(heaviest(layers, other, 1, last, pipeline) for other in all_counts(9, pipeline.num_stages))
    assert heaviest(layers, counts, 1, last, pipeline) == best


def test_layers_of_several_costs_are_nearly_as_good_as_can_be() -> None:
    draw = random.Random(0)
    for _ in range(30):
        layers = [draw.choice((4, 10, 13)) for _ in range(10)]
        pipeline = draw.choice((Pipeline(3), Pipeline(2, 2)))
        counts = balanced_counts(layers, 1, 17, pipeline)
        best = min(heaviest(layers, other, 1, 17, pipeline) for other in all_counts(10, pipeline.num_stages))
        assert heaviest(layers, counts, 1, 17, pipeline) <= best + 4  # the lightest layer


def test_the_chunks_of_a_rank_are_alike_too() -> None:
    assert balanced_counts([10] * 16, 0, 0, Pipeline(2, 4)) == [2] * 8
    assert balanced_counts([10] * 14, 10, 10, Pipeline(2, 2)) == [3, 4, 4, 3]
