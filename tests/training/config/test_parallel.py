"""Rules of the flags of ranks and groups."""

import pytest
from support.command_lines import problems_of_config

from megatron.training.config.parallel import ParallelConfig


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"distributed_timeout_minutes": 0}, "--distributed-timeout-minutes 0 must be at least 1"),
        ({"num_virtual_stages_per_pipeline_rank": 0}, "--num-virtual-stages-per-pipeline-rank 0 must be at least 1"),
    ],
)
def test_impossible_values(values: dict[str, object], problem: str) -> None:
    found = problems_of_config(ParallelConfig, **{**GOOD, **values})
    assert len(found) == 1 and found[0].startswith(problem), found


GOOD: dict[str, object] = {}


def test_possible_values_are_no_problem() -> None:
    assert problems_of_config(ParallelConfig, **GOOD) == []
