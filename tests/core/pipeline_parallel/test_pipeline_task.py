"""The position of a rank in its pipeline."""

from typing import Any

import pytest

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.pipeline_parallel.runner import PipelineTask
from megatron.core.pipeline_parallel.stages import Pipeline, StatesIn


def task(rank: int, pipeline: Pipeline, **fields: Any) -> PipelineTask:
    groups = ProcessGroupCollection.from_grid(RankGrid(pipeline.pipeline_size, pipeline=pipeline.pipeline_size), rank)
    return PipelineTask(lambda *_: None, [], [], None, groups, pipeline, 1, **fields)  # type: ignore[arg-type, return-value]


def test_stages_of_a_rank() -> None:
    assert [task(1, Pipeline(3, 2)).stage_index(chunk) for chunk in (0, 1)] == [1, 4]
    assert [task(1, Pipeline(3, 2, v_shaped=True)).stage_index(chunk) for chunk in (0, 1)] == [1, 4]
    assert [task(0, Pipeline(3, 2, v_shaped=True)).stage_index(chunk) for chunk in (0, 1)] == [0, 5]


@pytest.mark.parametrize(
    ("rank", "pipeline", "chunk", "step", "expected"),
    [
        (2, Pipeline(3, 2, v_shaped=True), 0, 1, 1),  # the turn of the V is on one rank
        (2, Pipeline(3, 2, v_shaped=True), 1, -1, 0),
        (2, Pipeline(3, 2, v_shaped=True), 1, 1, None),
        (0, Pipeline(3, 2, v_shaped=True), 0, -1, None),  # the first stage
        (0, Pipeline(3, 2, v_shaped=True), 1, 1, None),  # the last one
        (2, Pipeline(3, 2), 0, 1, None),
        (0, Pipeline(1, 3), 1, 1, 2),
        (0, Pipeline(1, 3), 0, -1, None),
    ],
)
def test_neighbours_on_the_same_rank(
    rank: int, pipeline: Pipeline, chunk: int, step: int, expected: int | None
) -> None:
    assert task(rank, pipeline).local_neighbour(chunk, step) == expected


def test_a_stage_receives_one_state_per_token_unless_told_otherwise() -> None:
    assert task(0, Pipeline(2)).states_into(1) == StatesIn(decoder=1)
    assert task(0, Pipeline(2), states_in=(StatesIn(), StatesIn(3))).states_into(1) == StatesIn(3)
