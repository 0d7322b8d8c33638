"""Dropout bits of attention, in Triton's interpreter."""

from support import flash_agreement


def test_the_bits_are_those_of_the_definition() -> None:
    flash_agreement.bits()
