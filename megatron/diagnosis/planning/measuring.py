"""Tries the best layouts of a plan for a few steps on this machine, and ranks them by what was measured.

A trial has the run's own flags, made-up data and as many replicas as the machine has processes for; the batch shrinks
with them, so that each rank has the micro-batches of the plan. What only the whole cluster has (more replicas, links
between nodes) is not measured, and the comment in run.yaml says so.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.layouts import Layout
from megatron.diagnosis.planning.plan import Plan
from megatron.diagnosis.planning.ranking import Candidate, Loser
from megatron.diagnosis.planning.settings_of_run import layout_settings, words_of

STEPS, WARM_UP = 6, 2
"""Steps of a trial, and those that are left out of its median."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A layout that was tried."""

    candidate: Candidate
    seconds: float | None
    """Median time of a step; None: it failed, or needs more processes."""
    reason: str
    """What was measured, or why nothing was."""


def trial_words(plan: Plan, layout: Layout, processes: int, metrics: Path) -> list[str] | None:
    """Returns the flags of a trial; None if a replica needs more ranks than there are processes."""
    replica = layout.tensor * layout.context * layout.pipeline
    data = min(layout.data, processes // replica)
    if not data or (layout.expert > 1 and (layout.tensor * layout.context * data) % layout.expert):
        return None
    batch = plan.values.global_batch_size // layout.data * data
    words = words_of([*plan.run.settings, *layout_settings(layout, {"": ""})])
    words += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(plan.run.vocab_size - 1)]
    words += ["--global-batch-size", str(batch), "--exit-interval", str(STEPS), "--eval-iters", "0"]
    return [*words, "--log-interval", "1", "--metrics-path", str(metrics)]


def measure(plan: Plan, script: Path, processes: int) -> Iterator[Trial]:
    """Tries the plan's layouts, one after the other, with up to `processes` processes of this machine. Raises UserError
    if the script does not exist."""
    if not script.is_file():
        raise UserError(f"--measure: {script} does not exist; start this in the folder of {script.name}")
    for candidate in plan.ranking.best:
        with tempfile.TemporaryDirectory(prefix="plan-") as folder:
            metrics = Path(folder) / "metrics.jsonl"
            layout = candidate.layout
            words = trial_words(plan, layout, processes, metrics)
            if words is None:
                yield Trial(candidate, None, f"not tried: a replica needs more than {processes} processes")
                continue
            replica = layout.tensor * layout.context * layout.pipeline
            ranks = replica * min(layout.data, processes // replica)
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            done = subprocess.run([*torchrun, str(script), *words], capture_output=True, text=True)
            yield _judged(candidate, done, metrics, ranks)


def _judged(candidate: Candidate, done: "subprocess.CompletedProcess[str]", metrics: Path, ranks: int) -> Trial:
    times = step_seconds(metrics)
    if done.returncode or not times:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or ["no step was timed"]
        return Trial(candidate, None, f"failed with exit code {done.returncode}: {lines[0].strip()[:150]}")
    seconds = statistics.median(times)
    return Trial(
        candidate, seconds, f"measured: {seconds:.3g} s a step, median of {len(times)} with {ranks} ranks here"
    )


def step_seconds(metrics: Path) -> list[float]:
    """Returns the seconds of the steps after the warm-up in a run's metrics; none without a file."""
    if not metrics.is_file():
        return []
    records = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    return [record["ms per iteration"] / 1000 for record in records if "ms per iteration" in record][WARM_UP:]


def with_measurements(plan: Plan, trials: list[Trial]) -> Plan:
    """Returns the plan with its layouts in the order of the measured times; those without one come last. The chosen
    layout names its measurement. Raises UserError if nothing was measured."""
    measured = sorted((trial for trial in trials if trial.seconds is not None), key=lambda trial: trial.seconds or 0.0)
    if not measured:
        raise UserError(f"--measure: no layout could be measured; the first: {trials[0].reason}")
    others = [trial for trial in trials if trial.seconds is None]
    best = tuple(trial.candidate for trial in (*measured, *others))
    losers = (*(Loser(trial.candidate.layout, trial.reason) for trial in others), *plan.ranking.losers)
    ranking = dataclasses.replace(plan.ranking, best=best, losers=losers)
    return dataclasses.replace(plan, ranking=ranking, measured=measured[0].reason)
