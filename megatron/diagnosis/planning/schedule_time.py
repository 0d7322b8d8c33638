"""The time of a pipeline schedule with many ranks and micro-batches, from a simulation of a part of it.

Once a pipeline is full, each further micro-batch takes as long as the busiest rank computes. Filling and draining it
takes a time that grows linearly with the number of ranks. So the simulator runs at most `_MICRO_BATCHES` micro-batches
for each rank, and of a long pipeline one of `_RANKS` ranks with the same first and last stage.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.simulator import Costs, Timeline, simulate

_RANKS, _LONGEST = 8, 8
"""Ranks of the simulated pipeline, and of the longest pipeline that is simulated itself."""
_MICRO_BATCHES = 2


@dataclass(frozen=True)
class ScheduleTime:
    """The time of all micro-batches of a step."""

    seconds: float
    bubble: float
    """The fraction of all ranks' time in which they wait."""
    schedule: Schedule
    """What was simulated."""
    timeline: Timeline


def schedule_time(schedule: Schedule, costs: Sequence[Costs]) -> ScheduleTime:
    """Returns the time of a schedule. `costs` has an entry for each stage."""
    busy = busy_of_ranks(schedule, costs)
    ranks, batches = schedule.pipeline.pipeline_size, schedule.num_microbatches
    simulated, used = _simulated(schedule, costs)
    timeline = simulate(simulated, used)
    waits = timeline.length - simulated.num_microbatches * max(busy_of_ranks(simulated, used))
    size = simulated.pipeline.pipeline_size
    if size < ranks:
        waits *= (ranks - 1) / (size - 1)
    seconds = batches * max(busy) + waits
    return ScheduleTime(seconds, 1.0 - batches * sum(busy) / (seconds * ranks), simulated, timeline)


def busy_of_ranks(schedule: Schedule, costs: Sequence[Costs]) -> list[float]:
    """Returns the time in which each rank computes a micro-batch."""
    pipeline = schedule.pipeline
    each = [cost.forward + cost.input_gradient + cost.weight_gradient for cost in costs]
    return [
        sum(each[pipeline.stage_index(rank, chunk)] for chunk in range(pipeline.chunks))
        for rank in range(pipeline.pipeline_size)
    ]


def _simulated(schedule: Schedule, costs: Sequence[Costs]) -> tuple[Schedule, Sequence[Costs]]:
    """Returns the schedule to simulate, and the costs of its stages."""
    pipeline, group = schedule.pipeline, schedule.group_size
    if pipeline.pipeline_size > _LONGEST:
        size = _RANKS
        inner = _mean(costs[1:-1])
        costs = [costs[0], *[inner] * (size * pipeline.chunks - 2), costs[-1]]
        group = None if group is None else max(size, group * size // pipeline.pipeline_size)
        pipeline = dataclasses.replace(pipeline, pipeline_size=size)
        batches = max(1, schedule.num_microbatches * size // schedule.pipeline.pipeline_size)
    else:
        batches = schedule.num_microbatches
    together = group or pipeline.pipeline_size
    most = -(-_MICRO_BATCHES * pipeline.pipeline_size // together) * together
    small = dataclasses.replace(
        schedule, pipeline=pipeline, group_size=group, num_microbatches=min(batches, max(most, 4))
    )
    return small, costs


def _mean(costs: Sequence[Costs]) -> Costs:
    count = len(costs)
    return Costs(
        sum(each.forward for each in costs) / count,
        sum(each.input_gradient for each in costs) / count,
        sum(each.weight_gradient for each in costs) / count,
        sum(each.message for each in costs) / count,
    )
