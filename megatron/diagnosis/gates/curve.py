"""A loss curve and its robust statistics: smoothing, noise, excursions, slopes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from megatron.training.log.jsonl import MetricsHistory

_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True)
class LossCurve:
    """The training losses of a run, and what is known about its data."""

    steps: np.ndarray
    """int64 [n]: increasing iterations; there may be gaps."""
    losses: np.ndarray
    """float64 [n]: nats per token; NaN or inf where the loss was not finite."""
    rates: np.ndarray | None = None
    """float64 [n]: learning rates."""
    uniform: float | None = None
    """ln(vocabulary size): the loss of a model that knows nothing."""
    unigram: float | None = None
    """Entropy of the data's token frequencies: the loss of a model that knows only these."""

    def until(self, step: int) -> "LossCurve":
        """Returns the curve up to a step."""
        count = int(np.searchsorted(self.steps, step, side="right"))
        rates = None if self.rates is None else self.rates[:count]
        return LossCurve(self.steps[:count], self.losses[:count], rates, self.uniform, self.unigram)


def curve_of(
    history: MetricsHistory, loss: str = "lm loss", uniform: float | None = None, unigram: float | None = None
) -> LossCurve:
    """Returns the curve of a metrics file. Lines without this loss are left out."""
    lines = [line for line in history.training if loss in line or loss in line.get("non_finite", {})]
    values = [float("nan") if line.get(loss) is None else float(line[loss]) for line in lines]
    rates = np.array([line.get("learning rate", np.nan) for line in lines], np.float64)
    known = None if np.isnan(rates).any() else rates
    return LossCurve(
        np.array([line["iteration"] for line in lines], np.int64), np.array(values), known, uniform, unigram
    )


def running_median(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the median of the `window` (odd) values around each value; at the ends of those that exist."""
    half = window // 2
    padded = np.concatenate([np.full(half, np.nan), values, np.full(half, np.nan)])
    inner = np.median(sliding_window_view(values, window), axis=1) if len(values) >= window else np.empty(0)
    result = np.empty_like(values)
    for place in [*range(min(half, len(values))), *range(max(half, len(values) - half), len(values))]:
        result[place] = np.nanmedian(padded[place : place + window])
    if len(inner):
        result[half : half + len(inner)] = inner
    return result


def local_noise(losses: np.ndarray, smooth: np.ndarray) -> np.ndarray:
    """Returns the standard deviation of the noise at each step, from the absolute residuals of blocks."""
    residuals = np.abs(losses - smooth)
    blocks = np.array_split(np.arange(len(losses)), max(1, min(12, len(losses) // 25)))
    # A window's median follows the noise a little, so the residuals are slightly too small.
    scales = [1.05 * _NORMAL * float(np.median(residuals[block])) for block in blocks]
    return np.interp(np.arange(len(losses)), [float(block.mean()) for block in blocks], scales)


@dataclass(frozen=True)
class Excursion:
    """Steps whose loss lies far above the lowest level before them."""

    first: int
    last: int
    """Positions in the curve."""
    height: float
    """Largest loss above the level, in nats."""
    recovered: bool
    """Whether the loss came back before the end."""


def excursions(losses: np.ndarray, smooth: np.ndarray, noise: np.ndarray, skip: int) -> list[Excursion]:
    """Returns the excursions after the first `skip` steps: losses more than 8 standard deviations of the noise and 5%
    above the lowest smoothed loss before. One ends when the loss is back within half of that."""
    lowest = np.minimum.accumulate(smooth)
    limit = np.maximum(8.0 * noise, 0.05 * lowest)
    above = losses - lowest
    found: list[Excursion] = []
    place = skip
    candidates = np.flatnonzero(above > limit)
    while True:
        later = candidates[np.searchsorted(candidates, place) :]
        if not len(later):
            return found
        first = int(later[0])
        # Two losses in a row below: a single low one inside a long excursion does not end it.
        below = above < limit / 2
        back = np.flatnonzero(below[first:-1] & below[first + 1 :])
        recovered = len(back) > 0
        last = first + int(back[0]) - 1 if recovered else len(losses) - 1
        found.append(Excursion(first, last, float(above[first : last + 1].max()), recovered))
        place = last + 2


@dataclass(frozen=True)
class Slope:
    """Decline of the loss for each factor e of steps: positive if the loss falls."""

    decline: float
    error: float
    """Standard error."""
    count: int


def log_slope(steps: np.ndarray, losses: np.ndarray) -> Slope:
    """Fits losses = a - decline * ln(steps) by least squares, after outliers (3 standard deviations) are left out."""
    if len(steps) < 8:
        return Slope(0.0, float("inf"), len(steps))
    x = np.log(steps.astype(np.float64))
    keep = np.ones(len(x), bool)
    decline, error = 0.0, float("inf")
    for _ in range(2):
        xs, ys = x[keep], losses[keep]
        centred = xs - xs.mean()
        spread = float(centred @ centred)
        if spread < 1e-12:
            return Slope(0.0, float("inf"), len(steps))
        decline = -float(centred @ ys) / spread
        residuals = losses - (ys.mean() - decline * (x - xs.mean()))
        deviation = max(_NORMAL * float(np.median(np.abs(residuals[keep]))), 1e-12)
        error = deviation / spread**0.5
        keep = np.abs(residuals) <= 3.0 * deviation
        if keep.sum() < 8:
            break
    return Slope(decline, error, len(steps))


def level(losses: np.ndarray, noise: np.ndarray) -> tuple[float, float]:
    """Returns the median of some losses, and its standard error."""
    return float(np.median(losses)), float(1.2533 * np.median(noise) / len(losses) ** 0.5)


def named_steps(steps: Sequence[int], most: int = 8) -> str:
    """Returns step numbers as text."""
    shown = ", ".join(map(str, steps[:most]))
    return shown + (f" and {len(steps) - most} more" if len(steps) > most else "")
