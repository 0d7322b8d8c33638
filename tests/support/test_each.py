"""A check of many values is one test, which names every value that fails."""

from pathlib import Path

import pytest
from support.each import for_each

SEEN = []


@for_each(["one", "two"])
def test_each_value_is_checked_with_the_fixtures(value: str, tmp_path: Path) -> None:
    SEEN.append((value, tmp_path.is_dir()))


def test_all_were_checked() -> None:
    assert SEEN == [("one", True), ("two", True)]


def test_every_value_that_fails_is_named() -> None:
    @for_each([1, 2, 3], lambda number: f"number {number}")
    def even(number: int) -> None:
        assert number % 2 == 0

    with pytest.raises(AssertionError, match=r"(?s)number 1: .*number 3: ") as raised:
        even()
    assert "number 2" not in str(raised.value)
