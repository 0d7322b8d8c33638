"""Tests of the sizes of tiles, and that launches use them."""

import re
from pathlib import Path

import pytest

import megatron.core
from megatron.core.ops.tiles import cdiv, common_alignment, next_power_of_2


def test_numbers_of_tiles_are_rounded_up() -> None:
    assert [cdiv(count, 64) for count in (0, 1, 63, 64, 65, 2**40 + 1)] == [0, 1, 1, 1, 2, 2**34 + 1]


def test_powers_of_two() -> None:
    assert [next_power_of_2(count) for count in range(10)] == [0, 1, 2, 4, 4, 8, 8, 8, 8, 16]


def test_the_alignment_of_strides_divides_all_of_them() -> None:
    assert [common_alignment(*strides) for strides in ((772,), (512, 772), (64, 0), (6, 8), (5,))] == [4, 4, 8, 2, 1]


def test_they_agree_with_those_of_triton() -> None:
    triton = pytest.importorskip("triton")
    for count in (*range(1, 40), 1000, 4096, 128256):
        assert cdiv(count, 24) == triton.cdiv(count, 24)
        assert next_power_of_2(count) == triton.next_power_of_2(count)


def test_no_launch_calls_the_slow_functions_of_triton() -> None:
    core = Path(megatron.core.__file__).parent
    found = [str(file) for file in core.rglob("*.py") if re.search(r"triton\.(cdiv|next_power_of_2)", file.read_text())]
    assert not found
