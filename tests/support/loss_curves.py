"""Loss curves drawn at random: healthy ones, and ones with a fault of each kind that the loss gate names.

A healthy curve starts near ln(vocabulary), falls fast to about the unigram entropy, then by a power law of the steps
that the learning rate allows. Noise has a normal part, rare outliers, and a level of its own in each curve; it shrinks
where the batch grows; in some it is correlated. Most carry harmless events: gaps of resumed runs, single spikes, a
pause at the unigram entropy, a continued run, a rise in the warm-up, a second kind of data, drops at epochs, a decayed
learning rate.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from megatron.diagnosis.gates.curve import LossCurve

BAD = ("flat from zero", "too low a rate", "shuffled labels", "flat after N", "spikes", "divergence")


@dataclass(frozen=True)
class DrawnCurve:
    """A curve, and what was done to it."""

    curve: LossCurve
    kind: str
    """"good" or a name of `BAD`."""
    note: str = ""


def draw_curve(kind: str, seed: int) -> DrawnCurve:
    """Returns a curve of a kind."""
    random = np.random.default_rng([seed, ("good", *BAD).index(kind)])
    healthy = _draw_healthy(random)
    return healthy if kind == "good" else _CHANGES[kind](healthy, random)


@dataclass(frozen=True)
class _Clean:
    """The parts that a curve is put together from."""

    steps: np.ndarray
    loss: np.ndarray
    noise: np.ndarray
    rates: np.ndarray
    uniform: float
    unigram: float


def _draw_parts(random: np.random.Generator, slow: float = 1.0, pause: bool = False) -> _Clean:
    vocabulary = int(random.choice([600, 2048, 32000, 50257, 128256, 200000]))
    uniform = math.log(vocabulary)
    unigram = uniform * random.uniform(0.62, 0.85)
    count = int(random.choice([200, 300, 500, 1000, 2000, 5000]))
    steps = np.arange(1, count + 1)
    warmup = max(1, int(count * random.choice([0.01, 0.03, 0.1])))
    rates = np.minimum(1.0, steps / warmup) * _decay(random, steps, warmup)
    # The first drop: to near the unigram entropy, within a few percent of the steps or a few hundred.
    done = np.cumsum(rates) / slow
    first = random.uniform(6.0, max(8.0, 0.03 * count))
    floor = unigram * random.uniform(0.25, 0.6)
    exponent = random.uniform(0.2, 0.6)
    begin = random.uniform(0.3, 1.0) * first * 6
    if pause:
        begin += random.uniform(0.05, 0.25) * count
    law = np.power(1.0 + np.maximum(done - (begin if pause else 0.0), 0.0) / begin, -exponent)
    slow_part = floor + (unigram * 1.005 - floor) * law
    loss = slow_part + (uniform - unigram) * np.exp(-done / first)
    # A smaller learning rate removes the part of the loss that comes from the noise of steps.
    loss = loss + random.uniform(0.0, 0.06) * (np.minimum(1.0, done / first / 4)) * rates
    noise = np.full(count, random.choice([0.006, 0.015, 0.04, 0.08, 0.14]) * uniform / 9)
    if random.random() < 0.25:  # a batch ramp in four stages
        noise = noise * np.array([2.0, 1.6, 1.25, 1.0])[np.minimum(3, steps * 8 // count)]
    peak = 10 ** random.uniform(-4, -2.3)
    return _Clean(steps, loss + random.uniform(0.0, 0.03), noise, rates * peak, uniform, unigram)


def _decay(random: np.random.Generator, steps: np.ndarray, warmup: int) -> np.ndarray:
    count, least = len(steps), random.choice([0.0, 0.05, 0.1])
    done = np.clip((steps - warmup) / max(1, count * random.choice([1.0, 1.0, 1.0, 8.0, 0.75]) - warmup), 0, 1)
    style = random.choice(["cosine", "constant", "wsd", "linear"])
    if style == "cosine":
        return least + (1 - least) * 0.5 * (1 + np.cos(np.pi * done))
    if style == "linear":
        return least + (1 - least) * (1 - done)
    if style == "wsd":
        return least + (1 - least) * np.minimum(1.0, (1 - done) / 0.2)
    return np.ones(count)


def _put_together(parts: _Clean, random: np.random.Generator, kind: str, note: str = "") -> DrawnCurve:
    draws = random.standard_normal(len(parts.steps))
    if random.random() < 0.2:  # neighbours share data
        draws = (draws + 0.5 * np.roll(draws, 1)) / 1.25**0.5
    outliers = random.random(len(parts.steps)) < 0.003
    draws = np.where(outliers, draws * random.uniform(2.0, 3.0), draws)
    losses = parts.loss + parts.noise * draws
    return DrawnCurve(LossCurve(parts.steps, losses, parts.rates, parts.uniform, parts.unigram), kind, note)


def _draw_healthy(random: np.random.Generator) -> DrawnCurve:
    events = ["", "", "", "gap", "spike", "spike at the end", "pause", "continued", "rise", "data", "epochs"]
    event = str(random.choice(events))
    parts = _draw_parts(random, pause=event == "pause")
    done = parts.steps / len(parts.steps)
    if event == "rise":  # a model that starts better than its first large steps leave it
        parts = replace(parts, loss=parts.loss + random.uniform(0.1, 0.5) * np.exp(-(((done - 0.01) / 0.008) ** 2)))
    if event == "data":
        parts = replace(parts, loss=parts.loss * np.where(done > random.uniform(0.3, 0.8), 1.02, 1.0))
    if event == "epochs":
        parts = replace(parts, loss=parts.loss * (1.0 - 0.02 * np.floor(done * 4)))
    drawn = _put_together(parts, random, "good", event)
    count, losses = len(parts.steps), drawn.curve.losses.copy()
    if event == "gap":
        first = int(random.uniform(0.2, 0.7) * count)
        keep = np.ones(count, bool)
        keep[first : first + int(random.uniform(0.02, 0.15) * count)] = False
        return replace(drawn, curve=_chosen(drawn.curve, keep))
    if event.startswith("spike"):
        at = count - int(random.integers(1, 4)) if "end" in event else int(random.uniform(0.2, 0.95) * count)
        _add_spike(losses, at, random, parts.noise)
        return replace(drawn, curve=replace(drawn.curve, losses=losses))
    if event == "continued":
        keep = np.arange(count) >= count // 3
        return replace(drawn, curve=_chosen(drawn.curve, keep))
    return drawn


def _chosen(curve: LossCurve, keep: np.ndarray) -> LossCurve:
    assert curve.rates is not None
    return replace(curve, steps=curve.steps[keep], losses=curve.losses[keep], rates=curve.rates[keep])


def _add_spike(losses: np.ndarray, at: int, random: np.random.Generator, noise: np.ndarray) -> None:
    height = max(random.uniform(0.12, 0.6) * losses[at], 14.0 * float(noise[at]))
    length = random.uniform(1.0, max(1.5, 0.006 * len(losses)))
    later = np.arange(len(losses) - at)
    losses[at:] += height * np.exp(-later / length)


# ---------------------------------------------------------------------------------------------------------------------
# Faults


def _flat_from_zero(healthy: DrawnCurve, random: np.random.Generator) -> DrawnCurve:
    parts = _draw_parts(random)
    drift = random.choice([0.0, 0.0, 0.003]) * parts.uniform * parts.steps / len(parts.steps)
    return _put_together(replace(parts, loss=parts.uniform + 0.02 - drift), random, "flat from zero")


def _too_low(healthy: DrawnCurve, random: np.random.Generator) -> DrawnCurve:
    """The first drop takes many times the steps of the run."""
    parts = _draw_parts(random)
    reached = random.uniform(0.08, 0.2)
    done = np.cumsum(parts.rates) / parts.rates.sum()
    bent = (1.0 - np.exp(-done * 0.5)) / (1.0 - math.exp(-0.5))
    loss = parts.uniform - (parts.uniform - parts.unigram) * reached * bent
    rates = parts.rates / random.choice([100, 1000])
    return _put_together(replace(parts, loss=loss, rates=rates), random, "too low a rate")


def _shuffled(healthy: DrawnCurve, random: np.random.Generator) -> DrawnCurve:
    parts = _draw_parts(random)
    done = np.cumsum(parts.rates) / parts.rates.max()
    first = random.uniform(5.0, 0.04 * len(parts.steps) + 6.0)
    excess = random.uniform(0.0, 0.01) * parts.unigram
    loss = parts.unigram + excess + (parts.uniform - parts.unigram) * np.exp(-done / first)
    return _put_together(replace(parts, loss=loss), random, "shuffled labels")


def _flat_after(healthy: DrawnCurve, random: np.random.Generator) -> DrawnCurve:
    parts = _draw_parts(random)
    at = int(random.uniform(0.15, 0.6) * len(parts.steps))
    while parts.rates[at] < 0.25 * parts.rates.max():  # otherwise it stops because the rate has decayed
        at = at * 3 // 4
    loss = np.where(np.arange(len(parts.steps)) < at, parts.loss, parts.loss[at])
    return _put_together(replace(parts, loss=loss), random, "flat after N", f"{at}")


def _spikes(healthy: DrawnCurve, random: np.random.Generator) -> DrawnCurve:
    drawn = _put_together(_draw_parts(random), random, "spikes")
    losses, count = drawn.curve.losses.copy(), len(drawn.curve.losses)
    smooth_noise = np.full(count, float(np.median(np.abs(np.diff(losses)))))
    number = int(random.integers(5, 14))
    for at in np.sort(random.choice(np.arange(count // 8, count - 3), number, replace=False)):
        _add_spike(losses, int(at), random, smooth_noise)
    return replace(drawn, curve=replace(drawn.curve, losses=losses))


def _divergence(healthy: DrawnCurve, random: np.random.Generator) -> DrawnCurve:
    parts = _draw_parts(random)
    count = len(parts.steps)
    at = int(random.uniform(0.1, 0.85) * count)
    later = np.maximum(0, np.arange(count) - at)
    style = str(random.choice(["jump", "climb", "not finite"]))
    top = random.uniform(0.25, 1.0) * max(parts.uniform - parts.loss[at], 0.3 * parts.loss[at])
    length = 3.0 if style == "jump" else random.uniform(0.03, 0.1) * count
    loss = np.where(later > 0, parts.loss[at] + top * (1.0 - np.exp(-later / length)), parts.loss)
    drawn = _put_together(replace(parts, loss=loss), random, "divergence", style)
    if style != "not finite":
        return drawn
    losses = drawn.curve.losses.copy()
    losses[min(count - 2, at + int(2 * length)) :] = np.nan
    return replace(drawn, curve=replace(drawn.curve, losses=losses))


_CHANGES = {
    "flat from zero": _flat_from_zero,
    "too low a rate": _too_low,
    "shuffled labels": _shuffled,
    "flat after N": _flat_after,
    "spikes": _spikes,
    "divergence": _divergence,
}
