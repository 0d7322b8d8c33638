r"""Draws a pipeline schedule without training: the computations of each rank, its waiting time, and its activations.

python tools/show_pipeline.py --pipeline-model-parallel-size 4 --num-microbatches 8
python tools/show_pipeline.py --pipeline-model-parallel-size 4 --num-microbatches 8 --pipeline-schedule zb-v \
    --output zb-v.svg

The picture is drawn from the action lists that training executes. Times have no unit. A time covers all chunks of a
rank; each chunk takes an equal part of it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.action_lists import rank_actions
from megatron.core.pipeline_parallel.actions import format_actions
from megatron.core.pipeline_parallel.drawing import as_svg, as_text, summary
from megatron.core.pipeline_parallel.orders import ONE_CHUNK_ORDERS, SCHEDULES, Schedule, schedule_name
from megatron.core.pipeline_parallel.simulator import Costs, simulate
from megatron.core.pipeline_parallel.stages import Pipeline


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    args = _parser().parse_args(argv)
    schedule = schedule_of(args)
    chunks = schedule.pipeline.chunks
    timeline = simulate(
        schedule,
        Costs(
            args.forward_time / chunks,
            args.input_gradient_time / chunks,
            args.weight_gradient_time / chunks,
            args.message_time,
        ),
    )
    print(*summary(schedule, timeline), sep="\n")
    if args.output is not None:
        try:
            args.output.write_text(as_svg(schedule, timeline), encoding="utf-8")
        except OSError as error:
            print(f"error: --output {args.output} cannot be written: {error.strerror}", file=sys.stderr)
            return 2
        print(args.output)
    elif args.actions:
        for rank in range(schedule.pipeline.pipeline_size):
            print(f"{rank}: {format_actions(rank_actions(schedule, rank))}")
    else:
        print(*as_text(timeline), sep="\n")
    return 0


_MOST_PASSES = 1_000_000


def schedule_of(args: argparse.Namespace) -> Schedule:
    """Returns the schedule of the flags. Raises UserError for flags that do not go together."""
    size, chunks, name = (
        args.pipeline_model_parallel_size,
        args.num_virtual_stages_per_pipeline_rank,
        args.pipeline_schedule,
    )
    group = args.microbatch_group_size_per_virtual_pipeline_stage
    for flag in ("pipeline_model_parallel_size", "num_microbatches", "num_virtual_stages_per_pipeline_rank"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise UserError(f"--{flag.replace('_', '-')} {value} must be at least 1")
    if size * (chunks or 1) * args.num_microbatches > _MOST_PASSES:
        raise UserError(
            f"--pipeline-model-parallel-size {size} x --num-virtual-stages-per-pipeline-rank {chunks or 1} x "
            f"--num-microbatches {args.num_microbatches} is too much for a picture; at most {_MOST_PASSES} works"
        )
    if name == "zb-v" and chunks not in (None, 2):
        raise UserError(
            f"--num-virtual-stages-per-pipeline-rank {chunks}: zb-v has 2 chunks a rank; leave the flag out"
        )
    if name in ONE_CHUNK_ORDERS and (chunks or 1) > 1:
        raise UserError(
            f"--num-virtual-stages-per-pipeline-rank {chunks}: {name} has one chunk a rank; use interleaved"
        )
    if name == "interleaved" and (chunks or 1) == 1:
        raise UserError("--pipeline-schedule interleaved needs --num-virtual-stages-per-pipeline-rank of 2 or more")
    if group is not None and group < size:
        raise UserError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is less than the {size} ranks; {size} works"
        )
    pipeline = Pipeline(size, 2 if name == "zb-v" else chunks or 1, v_shaped=name == "zb-v")
    return Schedule(schedule_name(name, pipeline), pipeline, args.num_microbatches, args.forward_only, group)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--pipeline-model-parallel-size", type=int, required=True, metavar="P", help="number of ranks")
    parser.add_argument(
        "--num-microbatches", type=int, required=True, metavar="M", help="number of micro-batches of a step"
    )
    parser.add_argument(
        "--num-virtual-stages-per-pipeline-rank", type=int, metavar="V", help="model chunks per rank (interleaved)"
    )
    parser.add_argument("--pipeline-schedule", choices=SCHEDULES, help="default: interleaved with chunks, else 1f1b")
    parser.add_argument(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        type=int,
        metavar="N",
        help="consecutive micro-batches of a chunk (interleaved); default: the number of ranks",
    )
    parser.add_argument("--forward-only", action="store_true", help="draw forward passes only, as in evaluation")
    parser.add_argument("--forward-time", type=float, default=1.0, metavar="T", help="time of a forward pass")
    parser.add_argument("--input-gradient-time", type=float, default=1.0, metavar="T", help="time of dX")
    parser.add_argument("--weight-gradient-time", type=float, default=1.0, metavar="T", help="time of dW")
    parser.add_argument(
        "--message-time", type=float, default=0.0, metavar="T", help="time of a message between neighbouring ranks"
    )
    parser.add_argument("--actions", action="store_true", help="print each rank's action list instead of a picture")
    parser.add_argument("--output", type=Path, metavar="FILE.svg", help="write the picture to this file")
    return parser


if __name__ == "__main__":
    run_main(main)
