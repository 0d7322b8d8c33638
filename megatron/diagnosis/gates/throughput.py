"""The throughput gate: tokens per second and GPU of the steps after the warm-up, against a target."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from megatron.diagnosis.gates.verdict import Figure, Outcome, Verdict
from megatron.training.log.jsonl import MetricsHistory

FEWEST_STEPS = 5
"""Steps after the warm-up that a verdict needs."""


def speeds(history: MetricsHistory, gpus: int, warmup_steps: int) -> list[tuple[int, float]]:
    """Returns, for each interval between two log lines after the warm-up, its number of steps and its tokens per second
    and GPU. The steps of an interval have the same speed in the metrics, since it is measured over all of them. An
    interval that began in the warm-up is left out."""
    first = min((line["iteration"] for line in history.training), default=0)
    found = []
    timed = [line for line in history.training if line.get("tokens per second")]
    for speed, lines in groupby(timed, key=lambda line: float(line["tokens per second"])):
        iterations = [line["iteration"] for line in lines]
        if iterations[0] >= first + warmup_steps:
            found.append((len(iterations), speed / gpus))
    return found


def judge_throughput(found: Sequence[tuple[int, float]], target: float) -> Verdict:
    """Returns the verdict about intervals (steps, tokens per second and GPU). It is unsure if the target lies within
    the spread of the intervals and the median is below it by less than 3%."""
    steps = sum(count for count, _ in found)
    if steps < FEWEST_STEPS:
        reason = f"{steps} steps after the warm-up are too few; run {FEWEST_STEPS} or more, or lower --warmup-steps"
        return Verdict("throughput", Outcome.UNSURE, reason, figures={"steps": steps})
    values = np.repeat([speed for _, speed in found], [count for count, _ in found])
    median = float(np.median(values))
    low, high = (float(value) for value in np.percentile(values, [10, 90]))
    figures: dict[str, Figure] = {
        "median tokens/s/GPU": median,
        "10th percentile": low,
        "90th percentile": high,
        "target tokens/s/GPU": target,
        "steps": steps,
    }
    measured = f"{median:,.0f} tokens/s/GPU, {median / target:.1%} of the target {target:,.0f}"
    spread = f"80% of {steps} steps are between {low:,.0f} and {high:,.0f}"
    if median >= target:
        return Verdict("throughput", Outcome.PASS, f"{measured}; {spread}", figures=figures)
    if median >= 0.97 * target and high >= target:
        reason = f"{measured}, which lies within the spread: {spread}; run more steps"
        return Verdict("throughput", Outcome.UNSURE, reason, figures=figures)
    return Verdict("throughput", Outcome.FAIL, f"{measured}; {spread}", ("below the target",), figures)
