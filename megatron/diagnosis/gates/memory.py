"""The memory gate: the peak of a few steps with the longest rows and the most uneven routing, against the memory that
there is.

On a GPU the peak is what torch reserved and what lies outside torch (contexts, NCCL). On a CPU it is the resident
memory of all ranks together, against the memory of the machine.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.diagnosis.gates.finished_run import FinishedRun
from megatron.diagnosis.gates.user_run import UserRun, run_part
from megatron.diagnosis.gates.verdict import Figure, Outcome, Verdict

GIB = 2**30


@dataclass(frozen=True)
class PeakOfRank:
    """Peak memory of a rank, in bytes."""

    rank: int
    device: str
    peak: int
    total: int
    outside_torch: int = 0
    steps: int = 0
    routers: int = 0


def judge_memory(
    run: UserRun, folder: Path, *, steps: int, max_utilization: float, limit: float | None, uneven: bool
) -> Verdict:
    """Runs `steps` steps under the worst case and judges the peak. `limit` replaces the device's memory, in GiB;
    `max_utilization` is in percent."""
    folder.mkdir(parents=True, exist_ok=True)
    before = ["-m", "megatron.diagnosis.gates.worst_case", str(folder), "uneven" if uneven else "even"]
    part = run_part(run, folder, steps, before_script=before)
    peaks = [_read(path) for path in sorted(folder.glob("peak_*.json"))]
    if "out of GPU memory" in part.output or "OutOfMemoryError" in part.output:
        return Verdict(
            "memory", Outcome.FAIL, f"out of GPU memory: {part.failure}", ("out of memory",), _figures(peaks)
        )
    if part.exit_code:
        raise UserError(f"the run failed (exit code {part.exit_code}): {part.failure}")
    if not peaks or min(one.steps for one in peaks) < steps:
        raise UserError(
            f"the script did not train {steps} steps with pretrain(), so its memory is not known; a script with a "
            "training loop of its own can be judged with --run"
        )
    return judge_peaks(peaks, max_utilization, limit, uneven)


def judge_peaks(peaks: Sequence[PeakOfRank], max_utilization: float, limit: float | None, uneven: bool) -> Verdict:
    """Returns the verdict about the peaks of all ranks."""
    on_cpu = peaks[0].device == "cpu"
    worst = max(peaks, key=lambda one: one.peak + one.outside_torch)
    used = sum(one.peak for one in peaks) if on_cpu else worst.peak + worst.outside_torch
    total = worst.total if limit is None else round(limit * GIB)
    percent = 100.0 * used / total
    routing = "the most uneven routing" if uneven and worst.routers else "the routing of the model"
    rows = "the longest rows" + (f" and {routing}" if any(one.routers for one in peaks) or not uneven else "")
    what = f"resident memory of {len(peaks)} ranks on a CPU" if on_cpu else f"rank {worst.rank} on {worst.device}"
    reason = (
        f"{used / GIB:.2f} of {total / GIB:.2f} GiB, {percent:.1f}%, with {rows} ({what}); at most "
        f"{max_utilization:g}% are allowed"
    )
    figures = _figures(peaks) | {"peak GiB": used / GIB, "memory GiB": total / GIB, "percent": percent}
    figures["max utilization"] = max_utilization
    if percent > max_utilization:
        return Verdict("memory", Outcome.FAIL, reason, ("too little headroom",), figures)
    return Verdict("memory", Outcome.PASS, reason, figures=figures)


def judge_memory_of(run: FinishedRun, max_utilization: float, limit: float | None) -> Verdict:
    """Returns the verdict about a finished run: that of the rank that logs, with the rows and routing that it met.
    `limit` is the memory of a GPU in GiB. Raises UserError without it."""
    if limit is None:
        raise UserError("--run: the metrics do not tell the memory of a GPU; give --memory-gib")
    name = "peak device memory (MB)"
    _, values = run.metrics.series(name)
    if not values:
        name = "host memory (MB)"
        _, values = run.metrics.series(name)
    if not values:
        raise UserError(f"--run: {run.metrics_path} has no memory")
    peak = max(values) / 1024
    percent = 100.0 * peak / limit
    figures: dict[str, Figure] = {"peak GiB": peak, "memory GiB": limit, "percent": percent}
    reason = f"{name.removesuffix(' (MB)')} of the rank that logs: {peak:.2f} of {limit:.2f} GiB, {percent:.1f}%"
    if percent > max_utilization:
        reason += f"; at most {max_utilization:g}% are allowed"
        return Verdict("memory", Outcome.FAIL, reason, ("too little headroom",), figures)
    reason += "; it met neither the longest rows nor the most uneven routing for certain, and other ranks may hold more"
    return Verdict("memory", Outcome.UNSURE, reason + ": run the gate with the run's flags", figures=figures)


def _figures(peaks: Sequence[PeakOfRank]) -> dict[str, Figure]:
    return {f"peak GiB of rank {one.rank}": (one.peak + one.outside_torch) / GIB for one in peaks}


def _read(path: Path) -> PeakOfRank:
    found: dict[str, Any] = json.loads(path.read_text())
    return PeakOfRank(**{name: found[name] for name in PeakOfRank.__dataclass_fields__})
