"""Slopes of ALiBi."""

import pytest

from megatron.core.ops.attention.alibi import alibi_slopes


@pytest.mark.parametrize("heads", [1, 2, 8, 16])
def test_powers_of_two_are_a_geometric_row(heads: int) -> None:
    assert alibi_slopes(heads) == pytest.approx([2 ** (-8 * i / heads) for i in range(1, heads + 1)])


def test_other_numbers_take_every_other_slope_of_the_next_power() -> None:
    assert alibi_slopes(6) == (*alibi_slopes(4), *alibi_slopes(8)[:4:2])
