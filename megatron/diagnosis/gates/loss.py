"""The loss gate on a finished run or on a command: finds the curve and the facts about its data, and draws it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.diagnosis.gates.curve import LossCurve, curve_of
from megatron.diagnosis.gates.finished_run import FinishedRun, open_finished_run
from megatron.diagnosis.gates.loss_curve import judge_loss
from megatron.diagnosis.gates.unigram import DataFacts, facts_of_flags
from megatron.diagnosis.gates.user_run import UserRun, run_part
from megatron.diagnosis.gates.verdict import Outcome, Verdict
from megatron.training.log.plot import plot_metrics


@dataclass(frozen=True)
class LossRequest:
    """What to judge."""

    name: str = "lm loss"
    """Name of the loss in the metrics."""
    by_step: int | None = None
    expected: float | None = None
    vocab_size: int | None = None
    """Size of the vocabulary; None: that of the data's tokenizer."""
    unigram: float | None = None
    """Unigram entropy in nats; None: counted in the data."""


@dataclass(frozen=True)
class JudgedLoss:
    """A verdict and the curve that it is about."""

    verdict: Verdict
    curve: LossCurve
    metrics_path: Path


def judge_loss_of(run: FinishedRun, request: LossRequest) -> JudgedLoss:
    """Judges a run by its metrics. Raises UserError if they have no such loss."""
    facts = _facts(run.values, request)
    uniform = None if facts.vocabulary is None else math.log(facts.vocabulary)
    curve = curve_of(run.metrics, request.name, uniform, facts.unigram)
    if not len(curve.steps):
        raise UserError(f"{run.metrics_path}: no training step has a value of {request.name!r}; give --loss-name")
    evaluated = _validation_loss(run, request, request.by_step or int(curve.steps[-1]))
    return JudgedLoss(judge_loss(curve, request.by_step, request.expected, evaluated), curve, run.metrics_path)


def _validation_loss(run: FinishedRun, request: LossRequest, step: int) -> float | None:
    """Returns the validation loss at a step, or within the tenth of the steps before it; None if there is none."""
    iterations, losses = run.metrics.validation_series(request.name)
    near = [loss for number, loss in zip(iterations, losses, strict=True) if 0.9 * step <= number <= step]
    return near[-1] if near else None


def judge_loss_of_command(run: UserRun, request: LossRequest, steps: int, folder: Path) -> JudgedLoss:
    """Runs a command for `steps` steps and judges its loss. A run that fails is judged by the steps that it did."""
    part = run_part(run, folder, steps)
    values = run.values()
    found = open_finished_run(folder)
    judged = judge_loss_of(FinishedRun(found.metrics_path, found.metrics, values), request)
    if part.exit_code and judged.verdict.outcome is not Outcome.FAIL:
        reason = f"the run failed (exit code {part.exit_code}): {part.failure}"
        return JudgedLoss(Verdict("loss", Outcome.FAIL, reason, ("run failed",)), judged.curve, judged.metrics_path)
    return judged


def _facts(values: Mapping[str, Any], request: LossRequest) -> DataFacts:
    counted = DataFacts()
    if request.unigram is None or request.vocab_size is None:
        counted = facts_of_flags(dict(values))
    return DataFacts(
        counted.unigram if request.unigram is None else request.unigram,
        request.vocab_size or counted.vocabulary or values.get("vocab_size"),
    )


def plot_verdict(judged: JudgedLoss, picture: Path, loss: str) -> None:
    """Draws the loss with the verdict as title, its steps, and the levels of models that know little."""
    levels = {"ln(vocabulary size)": judged.curve.uniform, "unigram entropy": judged.curve.unigram}
    plot_metrics(
        judged.metrics_path,
        picture,
        loss=loss,
        title=judged.verdict.line,
        levels={name: value for name, value in levels.items() if value is not None},
        marked_steps=judged.verdict.steps,
    )
