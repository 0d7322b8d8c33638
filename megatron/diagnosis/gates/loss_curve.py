"""The loss gate: judges a loss curve and names what is wrong with it.

A healthy loss begins near ln(vocabulary size), falls steeply below the entropy of the data's token frequencies (the
unigram entropy), and then falls by about as much for each doubling of the steps. The faults are deviations from that:

    flat from zero     never leaves its start: the learning rate, frozen weights, or the data
    too low a rate     falls, but is still far above the unigram entropy
    shuffled labels    stops at the unigram entropy: the labels have nothing to do with the inputs. A rate that is far
                       too high stops it there or a little above, and is named together with it
    flat after N       falls, then stops at step N
    spikes             leaves its level and comes back, three times or more
    divergence         leaves its level for good, or is not finite
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron.diagnosis.gates.curve import (
    Excursion,
    LossCurve,
    Slope,
    excursions,
    level,
    local_noise,
    log_slope,
    named_steps,
    running_median,
)
from megatron.diagnosis.gates.verdict import Figure, Outcome, Verdict

FLAT_FROM_ZERO = "flat from zero"
LOW_RATE = "too low a rate"
SHUFFLED = "shuffled labels"
FLAT_AFTER = "flat after N"
SPIKES = "spikes"
DIVERGENCE = "divergence"
ABOVE_EXPECTED = "above the expected loss"

FEWEST_STEPS = 40
"""With fewer losses only divergence is recognised."""
MOST_SPIKES = 2
"""Spikes that a healthy run may have, at least; and one for each 2,000 steps."""


@dataclass(frozen=True)
class _Summary:
    """What the rules look at. Arrays leave excursions out."""

    steps: np.ndarray
    losses: np.ndarray
    noise: np.ndarray
    rates: np.ndarray | None
    start: float
    """Loss at the beginning."""
    end: float
    """Median of the last tenth."""
    end_error: float
    spikes: list[Excursion]
    figures: dict[str, Figure]

    @property
    def decline(self) -> float:
        """How far the loss has fallen."""
        return self.start - self.end


def judge_loss(
    curve: LossCurve, by_step: int | None = None, expected: float | None = None, evaluated: float | None = None
) -> Verdict:
    """Returns the verdict about a curve up to `by_step` (None: all of it). `expected` is the loss that the run must
    have reached there: by its validation loss `evaluated`, or without one by the training loss."""
    last = int(curve.steps[-1]) if len(curve.steps) else 0
    curve = curve if by_step is None else curve.until(by_step)
    broken = _not_finite(curve)
    if broken is not None:
        return broken
    finite = np.isfinite(curve.losses)
    if finite.sum() < FEWEST_STEPS:
        return _verdict(
            Outcome.UNSURE, f"{int(finite.sum())} losses are too few to judge; run {FEWEST_STEPS} steps or more"
        )
    curve = LossCurve(
        curve.steps[finite],
        curve.losses[finite],
        None if curve.rates is None else curve.rates[finite],
        curve.uniform,
        curve.unigram,
    )
    found = _judge_shape(curve)
    if found.outcome is Outcome.FAIL:
        return found
    if by_step is not None and last < by_step:
        return _verdict(Outcome.UNSURE, f"the run is at step {last} of {by_step}; {found.reason}", found.figures)
    return found if expected is None else _against_expected(found, expected, evaluated)


def _verdict(
    outcome: Outcome,
    reason: str,
    figures: Mapping[str, Figure] | None = None,
    kinds: tuple[str, ...] = (),
    steps: list[int] | None = None,
) -> Verdict:
    return Verdict("loss", outcome, reason, kinds, figures or {}, steps or [])


def _not_finite(curve: LossCurve) -> Verdict | None:
    """Returns the verdict if losses at the end, or several in a row, are not finite. A lone one is a spike."""
    bad = ~np.isfinite(curve.losses)
    if not bad.any():
        return None
    several = bad[:-1] & bad[1:]
    if not (bad[-1] or several.any()):
        return None
    first = int(curve.steps[int(np.flatnonzero(bad)[0])])
    count = int(bad.sum())
    reason = f"the loss is not finite from step {first} on ({count} steps); see docs/failures.md, --nonfinite-action"
    return _verdict(Outcome.FAIL, reason, {"steps not finite": count}, (DIVERGENCE,), [first])


def _judge_shape(curve: LossCurve) -> Verdict:
    count = len(curve.losses)
    window = min(25, max(5, count // 40 * 2 + 1))
    smooth = running_median(curve.losses, window)
    noise = local_noise(curve.losses, smooth)
    found = excursions(curve.losses, smooth, noise, skip=max(5, count // 50))
    gone = [one for one in found if not one.recovered and one.last - one.first + 1 >= max(8, count // 40)]
    summary = _summarize(curve, noise, [one for one in found if one not in gone])
    risen = _divergence(curve, smooth, noise, gone, summary)
    if risen is not None:
        return risen
    for rule in (_never_learned, _spikes, _stopped):
        verdict = rule(curve, summary)
        if verdict is not None:
            return verdict
    return _healthy(curve, summary)


def _summarize(curve: LossCurve, noise: np.ndarray, spikes: list[Excursion]) -> _Summary:
    keep = np.ones(len(curve.losses), bool)
    for spike in spikes:
        keep[spike.first : spike.last + 2] = False
    steps, losses, kept_noise = curve.steps[keep], curve.losses[keep], noise[keep]
    tail = max(8, len(losses) // 10)
    end, end_error = level(losses[-tail:], kept_noise[-tail:])
    start = float(np.median(losses[: max(3, min(10, len(losses) // 40))]))
    figures: dict[str, Figure] = {"first loss": start, "last loss": end, "steps": int(curve.steps[-1])}
    figures |= {"ln(vocabulary)": curve.uniform, "unigram entropy": curve.unigram, "spikes": len(spikes)}
    rates = None if curve.rates is None else curve.rates[keep]
    if rates is not None:
        figures["largest learning rate"] = float(rates.max())
    return _Summary(steps, losses, kept_noise, rates, start, end, end_error, spikes, figures)


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def _divergence(
    curve: LossCurve, smooth: np.ndarray, noise: np.ndarray, gone: list[Excursion], summary: _Summary
) -> Verdict | None:
    """The loss ends far above the lowest level that it had."""
    tail = max(8, len(smooth) // 10)
    low_place = int(np.argmin(smooth))
    end, error = level(curve.losses[-tail:], noise[-tail:])
    # The lowest of many medians is low by chance: by about three of their standard errors.
    lowest = float(smooth[low_place]) + 3.0 * float(np.median(noise)) * 1.25 / min(25, len(smooth)) ** 0.5
    rise = end - lowest
    if not gone and not (rise > 0.04 * lowest and rise > 6.0 * error):
        return None
    at = int(curve.steps[gone[-1].first]) if gone else int(curve.steps[low_place])
    reason = (
        f"the loss rises from {lowest:.3f} to {end:.3f} from step {at} on and does not come back; lower the learning "
        "rate, lengthen the warm-up, or clip gradients"
    )
    return _verdict(Outcome.FAIL, reason, summary.figures | {"rise": rise}, (DIVERGENCE,), [at])


def _spikes(curve: LossCurve, summary: _Summary) -> Verdict | None:
    spikes = summary.spikes
    allowed = max(MOST_SPIKES, len(curve.steps) // 2000)
    if len(spikes) <= allowed:
        return None
    steps = [int(curve.steps[one.first]) for one in spikes]
    reason = (
        f"{len(spikes)} spikes, at steps {named_steps(steps)}, of up to {max(one.height for one in spikes):.2f} above "
        "the loss before them; check number formats (bf16 instead of fp16, fp32 residuals), the data of these steps, "
        "and clipping"
    )
    return _verdict(Outcome.FAIL, reason, summary.figures, (SPIKES,), steps)


def _never_learned(curve: LossCurve, summary: _Summary) -> Verdict | None:
    """The loss is still near where it began."""
    start, decline = summary.start, summary.decline
    fresh = int(curve.steps[0]) <= max(10, len(curve.steps) // 20)
    if curve.uniform is not None:
        fresh = fresh and start > 0.8 * curve.uniform
    if not fresh:
        return None  # it continues a trained model, whose loss falls slowly
    target = 0.25 * (start - curve.unigram) if curve.unigram is not None else 0.12 * start
    flat = decline < max(4.0 * summary.end_error, 0.015 * start)
    if not flat and decline >= target:
        return None
    rate = "" if summary.rates is None else f" (at most {summary.rates.max():.3g})"
    if summary.rates is not None and _still_warms_up(summary.rates):
        reason = f"the loss is still {summary.end:.3f}, but the learning rate{rate} still warms up; run more steps"
        return _verdict(Outcome.UNSURE, reason, summary.figures)
    if not flat:
        reason = (
            f"the loss falls, but only from {start:.3f} to {summary.end:.3f} in {len(curve.steps)} steps; the learning "
            f"rate{rate} is too low"
        )
        kinds = (LOW_RATE,) if decline > 0.03 * start else (LOW_RATE, FLAT_FROM_ZERO)
        return _verdict(Outcome.FAIL, reason, summary.figures, kinds)
    if curve.unigram is not None and start - curve.unigram < 0.03 * start:
        reason = (
            f"the loss stays at {summary.end:.3f}, which is also the unigram entropy of the data "
            f"({curve.unigram:.3f}): a frozen model and shuffled labels look alike"
        )
        return _verdict(Outcome.FAIL, reason, summary.figures, (FLAT_FROM_ZERO, SHUFFLED))
    reason = (
        f"the loss stays at its start: {start:.3f}, then {summary.end:.3f}; check the learning rate{rate}, frozen "
        "weights and the data"
    )
    # What a rate of 1e-7 moves is below the noise.
    return _verdict(Outcome.FAIL, reason, summary.figures, (FLAT_FROM_ZERO, LOW_RATE))


def _still_warms_up(rates: np.ndarray) -> bool:
    return bool(rates[-1] >= rates.max() and rates[-1] > 1.05 * rates[len(rates) * 3 // 4])


def _stopped(curve: LossCurve, summary: _Summary) -> Verdict | None:
    """The loss fell, and stopped: at the unigram entropy, or at a step N."""
    flat_from = _flat_from(summary)
    half = summary.losses[len(summary.losses) // 2 :]
    if curve.unigram is not None:
        later, error = level(half, summary.noise[len(summary.noise) // 2 :])
        near = max(0.02 * curve.unigram, 4.0 * error)
        above = later - curve.unigram, summary.end - curve.unigram
        if min(above) > -near and max(above) < max(near, 0.05 * curve.unigram):
            kinds = (SHUFFLED,) if max(above) < near else (SHUFFLED, DIVERGENCE)
            return _at_unigram(curve, summary, flat_from, kinds)
    if flat_from is None:
        return None
    kinds = (FLAT_AFTER,) if curve.unigram is not None else (FLAT_AFTER, SHUFFLED)
    hint = "the learning rate, frozen weights, repeated data"
    if curve.unigram is None:
        hint += "; or shuffled labels: give --unigram-entropy to tell"
    reason = f"the loss stays at {summary.end:.3f} from step {flat_from} on; check {hint}"
    return _verdict(Outcome.FAIL, reason, summary.figures, kinds, [flat_from])


def _at_unigram(curve: LossCurve, summary: _Summary, flat_from: int | None, kinds: tuple[str, ...]) -> Verdict | None:
    """The second half of the losses is at the unigram entropy, or somewhat above, where a rate that is far too high
    leaves it."""
    text = f"the loss is {summary.end:.3f}; the unigram entropy of the data is {curve.unigram:.3f}"
    middle = len(summary.steps) // 2
    tail = log_slope(summary.steps[middle:], summary.losses[middle:])
    falls = tail.decline - 3.0 * tail.error > 0.02 * summary.end
    if falls and flat_from is None:
        return None  # it passes this value on its way
    if len(summary.steps) < 200:
        return _verdict(Outcome.UNSURE, f"{text}: where every model pauses; run more steps", summary.figures)
    reason = f"{text}: the model learns only how frequent tokens are; the labels do not belong to the inputs"
    reason += ", or the learning rate is far too high" if DIVERGENCE in kinds else ""
    return _verdict(Outcome.FAIL, reason, summary.figures, kinds, [flat_from or int(summary.steps[middle])])


def _flat_from(summary: _Summary) -> int | None:
    """Returns the first step from which on the loss does not fall any more, although it fell before; None if it falls,
    or if the noise hides it. A loss that stops because the learning rate has decayed counts as falling."""
    steps, losses = summary.steps, summary.losses
    age = (steps - steps[0] + 1 if steps[0] <= 10 else steps).astype(np.float64)
    if summary.rates is not None and summary.rates.max() > 0:
        # A model moves by its learning rate, so the time that counts is the sum of the rates.
        moved = np.diff(age, prepend=age[0] - 1.0) * summary.rates / summary.rates.max()
        age = age[0] + np.cumsum(moved)
    for share in np.linspace(0.1, 0.72, 24):
        begin = int(share * len(steps))
        if len(steps) - begin < 25:
            break
        if age[-1] < 1.2 * age[begin]:  # what is left of the learning rate moves the model little
            break
        tail = log_slope(age[begin:], losses[begin:])
        if _falls(tail) or _falls(_slope_of_parts(age[begin:], losses[begin:])):
            continue
        before = slice(int(np.searchsorted(age, age[begin] / 4)), begin)
        fell = log_slope(age[before], losses[before])
        if fell.error == float("inf"):
            continue
        if tail.decline + 2.0 * tail.error < 0.2 * (fell.decline - 2.0 * fell.error):
            return int(steps[begin])
    return None


def _falls(slope: Slope) -> bool:
    return slope.decline > 3.0 * slope.error


def _slope_of_parts(age: np.ndarray, losses: np.ndarray) -> Slope:
    """Returns the mean slope of three quarters of some losses. The quarter that falls least is left out: it may have a
    step up between falling parts, as from other data, which is no plateau."""
    parts = [log_slope(a, b) for a, b in zip(np.array_split(age, 4), np.array_split(losses, 4), strict=True)]
    parts = sorted(parts, key=lambda one: one.decline / one.error)[1:]
    weights = np.array([one.error**-2.0 for one in parts])
    if not weights.sum():
        return Slope(0.0, float("inf"), len(age))
    decline = float(weights @ [one.decline for one in parts] / weights.sum())
    return Slope(decline, float(weights.sum() ** -0.5), len(age))


# ---------------------------------------------------------------------------------------------------------------------
# No fault


def _healthy(curve: LossCurve, summary: _Summary) -> Verdict:
    spikes = [int(curve.steps[one.first]) for one in summary.spikes]
    harmless = f"; harmless spikes at steps {named_steps(spikes)}" if spikes else ""
    text = f"the loss falls from {summary.start:.3f} to {summary.end:.3f} in {int(curve.steps[-1])} steps{harmless}"
    continued = curve.uniform is not None and summary.start < 0.8 * curve.uniform
    if summary.decline < 2.0 * summary.end_error:
        reason = f"no decline is visible: {summary.start:.3f}, then {summary.end:.3f}; run more steps"
        return _verdict(Outcome.UNSURE, reason, summary.figures, (), spikes)
    if curve.unigram is not None and summary.end > curve.unigram + 3.0 * summary.end_error and not continued:
        reason = f"{text}, but is above the unigram entropy of the data, {curve.unigram:.3f}; run more steps"
        return _verdict(Outcome.UNSURE, reason, summary.figures, (), spikes)
    if curve.unigram is None:
        text += "; the unigram entropy is not known, so shuffled labels are not ruled out"
    return _verdict(Outcome.PASS, text, summary.figures, (), spikes)


def _against_expected(found: Verdict, expected: float, evaluated: float | None) -> Verdict:
    last = found.figures["last loss"] if evaluated is None else evaluated
    assert isinstance(last, float)
    what = "training loss" if evaluated is None else "validation loss"
    figures = {**found.figures, "expected loss": expected, what: last}
    if last > expected * 1.005:
        reason = f"the {what} is {last:.3f} at step {found.figures['steps']}, and {expected:.3f} is expected"
        return _verdict(Outcome.FAIL, reason, figures, (ABOVE_EXPECTED,))
    reason = f"{found.reason}; {what} {last:.3f}, expected: {expected:.3f}"
    return Verdict("loss", found.outcome, reason, found.kinds, figures, found.steps)
