"""Dropout bits of attention, in Triton's interpreter."""

import pytest
from support import flash_agreement


@pytest.mark.parametrize("rows", [pytest.param(200, marks=pytest.mark.slow), 32])
def test_the_bits_are_those_of_the_definition(rows: int) -> None:
    flash_agreement.bits(rows)
