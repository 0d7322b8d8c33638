"""The resume gate: N steps are equal to k steps, a checkpoint, and N - k more steps.

Runs the user's own script. In the same layout, losses, gradient norms and all other values of the steps, and every
tensor of the last checkpoint, must be equal to the bit. In other layouts they must be equal to rounding.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.diagnosis.gates.user_run import FinishedPart, UserRun, kept_flags, run_part
from megatron.diagnosis.gates.verdict import Figure, Outcome, Verdict
from megatron.diagnosis.layout_check.run_comparison import (
    bisect_checkpoints,
    common_iterations,
    first_metrics_difference,
    open_run,
)

_FIRST_START_ONLY = ("pretrained_checkpoint", "load_hf")
_PRECISE = {"fp64": 1e-9, "fp32": 1e-4}
_REDUCED = 2e-2
"""Tolerance of bf16, fp16 and fp8, relative to the value."""


@dataclass(frozen=True)
class ResumePlan:
    """What the gate runs."""

    steps: int = 10
    at: int = 5
    """Step of the checkpoint."""
    layouts: tuple[tuple[str, ...], ...] = ()
    """Flags of other layouts to resume in."""
    tolerance: float | None = None
    """Relative difference that another layout may have; None: by number format."""

    def __post_init__(self) -> None:
        if not 0 < self.at < self.steps:
            raise UserError(f"--at {self.at} must be between 1 and --steps {self.steps} less 1")


def judge_resume(run: UserRun, plan: ResumePlan, folder: Path) -> Verdict:
    """Runs the parts in `folder` and compares them."""
    whole = run_part(run, folder / "whole", plan.steps, _saving(folder / "whole", plan.at))
    _check_end(whole, plan.steps, "the run")
    rest = _resumed(run, folder / "resumed", whole, plan)
    _check_end(rest, plan.steps, f"the run that resumes at step {plan.at}")
    found = _difference(whole, rest, plan.at, 0.0)
    figures: dict[str, Figure] = {"steps": plan.steps, "checkpoint": plan.at}
    if found is not None:
        again = run_part(run, folder / "again", plan.steps, _saving(folder / "again", plan.at))
        return _why_different(found, whole, again, figures)
    text = f"{plan.steps} steps and {plan.at} + {plan.steps - plan.at} steps are equal to the bit: losses, gradient "
    text += "norms, and all tensors of the last checkpoint"
    for number, layout in enumerate(plan.layouts):
        tolerance = plan.tolerance or _tolerance(run)
        other = _resumed(run.with_layout(layout), folder / f"layout_{number}", whole, plan)
        name = " ".join(layout)
        _check_end(other, plan.steps, f"the run in the layout {name}")
        far = _difference(whole, other, plan.at, tolerance, checkpoints=False)
        figures[f"tolerance of {name}"] = tolerance
        if far is not None:
            reason = f"{text}; but resumed with {name}, {far.text} (tolerance {tolerance:g}); compare the layouts with "
            return Verdict("resume", Outcome.FAIL, reason + "tools/verify_layout.py", ("layout",), figures, [far.step])
        text += f"; with {name} within {tolerance:g}"
    return Verdict("resume", Outcome.PASS, text, figures=figures)


def _saving(folder: Path, every: int) -> list[str]:
    return ["--save", str(folder), "--save-interval", str(every)]


def _resumed(run: UserRun, folder: Path, whole: FinishedPart, plan: ResumePlan) -> FinishedPart:
    flags = ["--save", str(folder), "--load", str(whole.folder), "--ckpt-step", str(plan.at)]
    fresh = replace(run, flags=tuple(kept_flags(run.flags, _FIRST_START_ONLY)))
    return run_part(fresh, folder, plan.steps, flags)


def _check_end(part: FinishedPart, steps: int, what: str) -> None:
    history = part.metrics()
    last = max((line["iteration"] for line in history.training), default=0)
    if part.exit_code or last != steps:
        problem = f"exit code {part.exit_code}: {part.failure}" if part.exit_code else "its flags end it sooner"
        raise UserError(f"{what} ended at step {last} of {steps} ({problem})")


@dataclass(frozen=True)
class _Found:
    step: int
    text: str


def _difference(
    whole: FinishedPart, other: FinishedPart, after: int, tolerance: float, checkpoints: bool = True
) -> _Found | None:
    """Returns the first difference of two runs' steps, or else of their last checkpoints; None if they are equal."""
    a, b = whole.metrics(), other.metrics()
    shared = common_iterations(a, b)
    expected = [line["iteration"] for line in a.training if line["iteration"] > after]
    if [one for one in shared if one > after] != expected:
        return _Found(after + 1, f"the resumed run has steps {shared[:1]} to {shared[-1:]}, not from {after + 1} on")
    found = first_metrics_difference(a, b, tolerance)
    if found is not None:
        x, y = (repr(value) for value in found.values)
        return _Found(found.iteration, f"{found.key} first differs in step {found.iteration}: {x} and {y}")
    if not checkpoints:
        return None
    tensors = bisect_checkpoints(open_run(whole.folder), open_run(other.folder), tolerance)
    if tensors is None:
        return None
    first = tensors.tensors[0]
    return _Found(
        tensors.iteration,
        f"the steps are equal, but {len(tensors.tensors)} tensors of the last checkpoint differ, first {first.name} "
        f"({first.where})",
    )


def _why_different(found: _Found, whole: FinishedPart, again: FinishedPart, figures: dict[str, Figure]) -> Verdict:
    """Tells a resume that is wrong from a run that gives other results each time."""
    random = _difference(whole, again, 0, 0.0)
    if random is not None:
        reason = f"two runs from the start differ too: {random.text}; a resume can only be judged with "
        return Verdict(
            "resume", Outcome.UNSURE, reason + "--deterministic-mode", ("not repeatable",), figures, [random.step]
        )
    reason = f"{found.text}; two runs from the start are equal, so a checkpoint lacks a state that the run depends on"
    return Verdict("resume", Outcome.FAIL, reason, ("state not saved",), figures, [found.step])


def _tolerance(run: UserRun) -> float:
    values = run.values()
    if values.get("fp64"):
        return _PRECISE["fp64"]
    reduced = any(values.get(name) for name in ("bf16", "fp16", "fp8", "fp4"))
    return _REDUCED if reduced else _PRECISE["fp32"]
