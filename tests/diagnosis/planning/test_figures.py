"""Errors and sources of sums."""

import pytest

from megatron.diagnosis.planning.figures import Figure, total


def test_errors_of_a_sum_add_up_and_sources_are_named_once() -> None:
    found = total([Figure(1.0, "b", 0.5), Figure(3.0, "a; c", 0.1), Figure(0.0, "nothing", 0.9), Figure(2.0, "a", 0.0)])
    assert found == Figure(6.0, "a; c; b", pytest.approx((0.5 + 0.3) / 6))
    assert total([]) == Figure(0.0, "", 0.0)


def test_a_rate_gives_seconds_with_its_error() -> None:
    assert Figure(4.0, "rate", 0.2).per(12.0) == Figure(3.0, "rate", 0.2)
    assert Figure(4.0, "rate", 0.2).times(2) == Figure(8.0, "rate", 0.2)
