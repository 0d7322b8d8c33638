"""All kinds of schedules in small sizes, for tests of the lists of actions."""

from megatron.core.pipeline_parallel.action_lists import rank_actions
from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.stages import Pipeline

SIZES = (1, 2, 3, 4, 7)
COUNTS = (1, 2, 3, 4, 5, 8, 13)


def schedules(forward_only: bool = False, ahead: int = 1) -> list[Schedule]:
    found = []
    for size in SIZES:
        for count in COUNTS:
            plain = [Schedule(name, Pipeline(size), count, forward_only, ahead=ahead) for name in ("1f1b", "zb-h1")]
            v = Schedule("zb-v", Pipeline(size, 2, v_shaped=True), count, forward_only, ahead=ahead)
            several = [
                Schedule("interleaved", Pipeline(size, chunks), count, forward_only, group, ahead)
                for chunks in (2, 3)
                for group in (None, size + 1, size + 3)
            ]
            found += [*plain, v, *several]
    return found


def one_stage(num_microbatches: int, forward_only: bool = False) -> tuple[Action, ...]:
    """The actions without pipeline parallelism."""
    return rank_actions(Schedule("1f1b", Pipeline(1), num_microbatches, forward_only), 0)
