"""Robust statistics of loss curves, against plain formulas."""

import numpy as np
import pytest

from megatron.diagnosis.gates.curve import curve_of, excursions, local_noise, log_slope, named_steps, running_median
from megatron.training.log.jsonl import MetricsHistory


@pytest.mark.parametrize("count", [3, 5, 40])
def test_running_median_uses_what_exists_at_the_ends(count: int) -> None:
    values = np.random.default_rng(0).standard_normal(count)
    expected = [np.median(values[max(0, i - 2) : i + 3]) for i in range(count)]
    np.testing.assert_array_equal(running_median(values, 5), expected)


def test_noise_is_found_although_it_changes_and_has_outliers() -> None:
    random = np.random.default_rng(1)
    true = np.where(np.arange(2000) < 1000, 0.2, 0.05)
    losses = 3.0 + true * random.standard_normal(2000)
    losses[::50] += 5.0
    noise = local_noise(losses, running_median(losses, 25))
    assert noise[300] == pytest.approx(0.2, rel=0.2) and noise[1700] == pytest.approx(0.05, rel=0.2)


def test_a_slope_per_factor_e_of_steps() -> None:
    steps = np.arange(1, 500)
    losses = 5.0 - 0.7 * np.log(steps) + 0.01 * np.random.default_rng(2).standard_normal(499)
    losses[100] = 90.0
    slope = log_slope(steps, losses)
    assert slope.decline == pytest.approx(0.7, abs=4 * slope.error) and 0 < slope.error < 2e-3


def test_steps_that_are_all_alike_have_no_slope() -> None:
    assert log_slope(np.ones(20), np.arange(20.0)).error == float("inf")


def test_excursions_come_back_or_not() -> None:
    losses = np.full(200, 2.0) + 0.01 * np.random.default_rng(3).standard_normal(200)
    losses[50:60] += 1.0
    losses[120] += 0.5
    losses[190:] += 2.0
    smooth = running_median(losses, 9)
    found = excursions(losses, smooth, np.full(200, 0.01), skip=5)
    assert [(one.first, one.last, one.recovered) for one in found] == [
        (50, 59, True),
        (120, 120, True),
        (190, 199, False),
    ]


def test_a_curve_keeps_losses_that_are_not_finite() -> None:
    lines = [
        {"iteration": 1, "lm loss": 3.0, "learning rate": 0.1},
        {"iteration": 2, "lm loss": None, "non_finite": {"lm loss": "nan"}, "learning rate": 0.1},
        {"iteration": 3, "grad norm": 1.0, "learning rate": 0.1},
    ]
    curve = curve_of(MetricsHistory(lines))
    assert curve.steps.tolist() == [1, 2] and np.isnan(curve.losses[1]) and curve.rates is not None


def test_a_curve_without_all_rates_has_none() -> None:
    assert curve_of(MetricsHistory([{"iteration": 1, "lm loss": 3.0}])).rates is None


def test_many_steps_are_shortened() -> None:
    assert named_steps([1, 2]) == "1, 2" and named_steps(range(10), 8).endswith("7 and 2 more")
