"""The time of a long schedule follows from a short simulation."""

import pytest

from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.simulator import Costs, simulate
from megatron.core.pipeline_parallel.stages import Pipeline
from megatron.diagnosis.planning.schedule_time import busy_of_ranks, schedule_time


def test_costs_of_each_stage() -> None:
    schedule = Schedule("1f1b", Pipeline(2), 1)
    timeline = simulate(schedule, [Costs(1, 2, 3, 10), Costs(5, 7, 11, 20)])
    # forward of stage 0, message, forward and backward of stage 1, message back, backward of stage 0
    assert timeline.length == 1 + 10 + 5 + 7 + 11 + 20 + 2 + 3
    assert busy_of_ranks(schedule, [Costs(1, 2, 3), Costs(5, 7, 11)]) == [6, 23]


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "batches", "error"),
    [
        ("1f1b", 4, 1, 64, 1e-9),
        ("1f1b", 16, 1, 8, 2e-3),
        ("1f1b", 24, 1, 72, 2e-3),
        ("interleaved", 4, 2, 32, 1e-9),
        ("interleaved", 16, 2, 32, 0.01),
        ("zb-h1", 16, 1, 48, 0.01),
        ("zb-v", 4, 2, 32, 0.03),
        ("zb-v", 12, 2, 36, 0.03),
    ],
)
def test_a_part_tells_the_whole(name: str, ranks: int, chunks: int, batches: int, error: float) -> None:
    schedule = Schedule(name, Pipeline(ranks, chunks, v_shaped=name == "zb-v"), batches)
    costs = [Costs(1.0, 1.1, 0.9, 0.05)] * schedule.pipeline.num_stages
    costs[-1] = Costs(1.3, 1.4, 1.2)
    whole, part = simulate(schedule, costs), schedule_time(schedule, costs)
    assert part.seconds == pytest.approx(whole.length, rel=error)
    assert part.bubble == pytest.approx(whole.bubble, abs=max(error, 1e-9))
    assert part.schedule.pipeline.pipeline_size <= 8
