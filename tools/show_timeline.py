"""Shows the parts of a step's time: computation, communication that is not hidden, and idle time.

python tools/show_timeline.py runs/tensorboard/rank_00000.steps_10_12.trace.json
python tools/show_timeline.py trace.json.gz --kernels 20

Reads traces that training writes with --profile --use-pytorch-profiler, on GPUs or CPUs. Several traces, such as one
per rank, are shown one after the other. Times are in milliseconds per step.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.training.log.timeline import StepTimes, TimeShare, read_step_times


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE.json", help="Chrome traces, .json or .json.gz")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="also show the N kernels that take longest")
    args = parser.parse_args(argv)
    for trace in args.traces:
        times = read_step_times(trace)
        print(f"{trace}:", *report(times, args.kernels), sep="\n")
    return 0


def report(times: StepTimes, kernels: int = 0) -> Iterator[str]:
    """Yields the lines of the tables. `kernels` is the number of kernels to list."""
    of_rank = "" if times.rank is None else f" of rank {times.rank}"
    yield (
        f"{times.device}{of_rank}, mean of {times.steps} steps"
        if times.steps
        else (f"{times.device}{of_rank}; no steps are marked, so this is the whole trace")
    )
    parts = {
        "step": times.step,
        "computing": times.computing,
        "communication, exposed": times.exposed_communication,
        "copies, exposed": times.exposed_copies,
        "idle": times.idle,
    }
    for name, time in parts.items():
        yield f"  {name:<24}{time:>12.3f} ms{time / times.step:>8.1%}"
    if times.communications:
        hidden = 1.0 - times.exposed_communication / times.communicating if times.communicating else 0.0
        yield f"communication: {times.communicating:.3f} ms, of which {hidden:.0%} hidden behind computation"
        yield f"  {'kind':<18}{'ranks':<12}{'calls':>8}{'ms':>12}{'exposed':>12}{'MB':>12}"
        for part in times.communications:
            size = f"{part.megabytes:>12.2f}" if part.megabytes else ""
            yield f"  {part.name:<18}{part.ranks:<12}{part.calls:>8g}{part.busy:>12.3f}{part.exposed:>12.3f}{size}"
    if kernels > 0:
        yield f"the {min(kernels, len(times.kernels))} longest of {len(times.kernels)} kernels"
        yield f"  {'ms':>10}{'calls':>8}  name"
        yield from map(_kernel_line, times.kernels[:kernels])


def _kernel_line(part: TimeShare) -> str:
    return f"  {part.busy:>10.3f}{part.calls:>8g}  {part.name[:120]}"


if __name__ == "__main__":
    run_main(main)
