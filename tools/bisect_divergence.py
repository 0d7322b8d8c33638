"""Finds where two runs begin to differ: the first step, the first checkpoint and tensor, and with --rerun the first
layer and rank.

    python tools/bisect_divergence.py runs/a runs/b                  # folders of --save
    python tools/bisect_divergence.py runs/a/iter_0000100 runs/b/iter_0000100
    python tools/bisect_divergence.py runs/a runs/b --rerun          # compute the step again, watching every layer
    python tools/bisect_divergence.py a.txt b.txt                    # files with command lines: the same, from step 1

1. metrics.jsonl of both: the first step whose loss, gradient norm or another value differs.
2. Checkpoints of the same iterations: the first pair that differs, found by bisection; its tensors in the order of the
   model, with the element that differs most and the ranks that wrote it.
3. --rerun (always for command lines): both runs are computed again on this machine, each in its own layout, from the
   newest checkpoint that is equal in both. Outputs of layers, gradients, norms and weights are compared by token and
   element. If they first differ in a later step, that step is computed again and watched.

A file has the words of a command line, with or without torchrun before the script. Flags after -- are added to both
runs. Exit code 0: nothing differs; 1: something does; 2: the runs cannot be compared.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

from megatron.core.exceptions import UserError
from megatron.diagnosis.layout_check.differences import Difference, differences, report
from megatron.diagnosis.layout_check.layout_trace import NORM, LayoutTrace
from megatron.diagnosis.layout_check.run_comparison import (
    CheckpointDifference,
    ComparedRun,
    Rerun,
    TensorDifference,
    bisect_checkpoints,
    common_iterations,
    first_metrics_difference,
    open_run,
    rerun_of,
)
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.launch.errors import exit_with_problems
from megatron.training.log.jsonl import read_metrics
from tools.verify_layout import PRETRAIN_GPT, load_script, run

_SHOWN = 8
"""Largest number of differing tensors that are printed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    options = _read(argv)
    try:
        a, b = (open_run(path) for path in (options.run_a, options.run_b))
        differs, steps, last_equal = False, options.steps, None
        if a.metrics is not None and b.metrics is not None:
            first = compare_metrics(a, b, options.tolerance)
            differs = first is not None
            steps = steps or first
        if a.root is not None and b.root is not None and (a.checkpoints or b.checkpoints):
            found = bisect_checkpoints(a, b, options.tolerance)
            print(*checkpoint_lines(found), sep="\n", flush=True)
            differs = differs or found is not None
            last_equal = _before_newest(a, b) if found is None else found.last_equal
            common = a.checkpoints.keys() & b.checkpoints.keys()
            steps = steps or (max(common, default=None) if found is None else found.iteration)
        if options.rerun or a.root is None or b.root is None:
            count = 2 if steps is None else max(1, steps - (last_equal or 0))
            differs = rerun(a, b, last_equal, count, options, differs) or differs
    except UserError as error:
        exit_with_problems(error)
    return int(differs)


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bisect_divergence.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="folder of checkpoints, or file with a command line")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="the other run")
    parser.add_argument("--rerun", action="store_true", help="compute both runs again and compare every layer")
    parser.add_argument("--steps", type=int, help="last iteration of --rerun (default: that of the metrics)")
    parser.add_argument("--processes", type=int, default=8, help="largest number of processes to start (default: 8)")
    parser.add_argument("--script", type=Path, default=PRETRAIN_GPT, metavar="FILE", help="the runs' script")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="largest accepted difference, relative to the largest value; for two layouts about 1e-5 (default: 0)",
    )
    parser.add_argument("flags", nargs="*", help="after --: flags that --rerun adds to both runs")
    return parser.parse_args(argv)


def compare_metrics(a: ComparedRun, b: ComparedRun, tolerance: float) -> int | None:
    """Prints the first step whose values differ, and returns its iteration; None if all values are equal."""
    assert a.metrics is not None and b.metrics is not None
    histories = read_metrics(a.metrics), read_metrics(b.metrics)
    common = common_iterations(*histories)
    found = first_metrics_difference(*histories, tolerance)
    if found is None:
        print(f"metrics: equal in all {len(common)} iterations that both runs have", flush=True)
        return None
    x, y = ("nothing" if value is None else f"{value:.9g}" for value in found.values)
    print(f"metrics: {found.key} differs first in iteration {found.iteration}: {x} and {y}", flush=True)
    return found.iteration


def checkpoint_lines(found: CheckpointDifference | None) -> Iterator[str]:
    """Yields the lines about the first checkpoints that differ."""
    if found is None:
        yield "checkpoints: the newest that both runs have are equal"
        return
    before = "" if found.last_equal is None else f"; those of iteration {found.last_equal} are equal"
    yield f"checkpoints: {len(found.tensors)} tensors differ first in iteration {found.iteration}{before}"
    for difference in found.tensors[:_SHOWN]:
        yield f"  {_described(difference)}"
    if len(found.tensors) > _SHOWN:
        yield f"  and {len(found.tensors) - _SHOWN} more"
        yield f"  the largest difference: {_described(max(found.tensors, key=lambda each: each.error))}"


def _described(difference: TensorDifference) -> str:
    text = f"{difference.name}: by {difference.error:.1e} of its largest value, {difference.where}"
    if not difference.ranks[0]:
        return text
    ranks = (" and ".join(map(str, of_run)) for of_run in difference.ranks)
    return text + "; written by rank {} of the first run and rank {} of the second".format(*ranks)


def _before_newest(a: ComparedRun, b: ComparedRun) -> int | None:
    """Returns the second newest iteration of which both runs have a checkpoint; None if there is none."""
    common = sorted(a.checkpoints.keys() & b.checkpoints.keys())
    return common[-2] if len(common) > 1 else None


def rerun(
    a: ComparedRun, b: ComparedRun, start: int | None, steps: int, options: argparse.Namespace, differs: bool
) -> bool:
    """Computes both runs again, for `steps` steps after iteration `start`, and prints what differs first. `differs`:
    whether the files of the runs do."""
    plans = [rerun_of(each, start, options.flags) for each in (a, b)]
    for each, plan in zip((a, b), plans, strict=True):
        if plan.world_size > options.processes:
            raise UserError(f"{each.name} ran in {plan.world_size} processes; --processes {plan.world_size} allows it")
    watched, found = 0, list[Difference]()
    with tempfile.TemporaryDirectory() as name:
        for attempt in ("first", "again"):
            where = "the beginning" if start is None else f"iteration {start}"
            print(f"computing {steps} steps of both runs from {where}, watching step {watched + 1}", flush=True)
            folders = (Path(name) / f"{attempt}_{number}" for number in (1, 2))
            traces = [_run(plan, steps, watched, folder, options) for plan, folder in zip(plans, folders, strict=True)]
            found = differences(merged(traces[0]), traces[1], options.tolerance, "the first run")
            later = _first_step(found)
            if not later or attempt == "again":
                break
            watched = later
    script, launch = load_script(options.script), LaunchEnvironment(plans[1].world_size, False)
    if script.note is not None:
        print(script.note)
    words = [*plans[1].words, *options.flags, "--dry-run"]
    grid = configure(words, script.add_flags, script.defaults, launch_environment=launch).grid.dense
    coordinates = {rank: grid.coordinates(rank) for rank in range(plans[1].world_size)}
    print(*report(found, coordinates, len(merged(traces[0]).found), options.tolerance), sep="\n", flush=True)
    if not found and differs:
        print(
            "neither the flags nor the code make the runs differ: look for broken hardware, a race, other versions, or "
            "changes that are in neither command"
        )
    return bool(found)


def _run(plan: Rerun, steps: int, watched: int, folder: Path, options: argparse.Namespace) -> list[LayoutTrace]:
    of_trace = {"defaults": load_script(options.script).defaults, "watched": watched, "perturb": False}
    return run(options.script, [*plan.words, *options.flags], plan.world_size, steps, folder, **of_trace)


def merged(traces: Sequence[LayoutTrace]) -> LayoutTrace:
    """Returns the traces of all ranks of a run as one."""
    whole = LayoutTrace()
    for trace in traces:
        for (kind, name), (places, values) in trace.found.items():
            whole.add(kind, name, places, values)
    return whole


def _first_step(found: Sequence[Difference]) -> int:
    """Returns the step (from 0) whose gradient norm differs first if step 0, which was watched, does not differ; else
    0."""
    names = [each.name for each in found if each.kind == NORM]
    early = [each for each in found if each.kind in ("initial weight", "forward", "gradient")]
    return 0 if early or not names else int(names[0].split()[-1]) - 1


if __name__ == "__main__":
    run_main(main)
