"""Markers leave the cases to `make test-all` that they say, and their names are those of cases."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.fast_cases import mark_slow, names_without_case


class Item(SimpleNamespace):
    """What the functions read of a test's case."""

    def __init__(self, case: str, **markers: tuple[str, ...]) -> None:
        super().__init__(nodeid=f"tests/test_a.py::test_x[{case}]", callspec=SimpleNamespace(id=case), added=[])
        self.get_closest_marker = {name: SimpleNamespace(args=args) for name, args in markers.items()}.get
        self.add_marker = self.added.append


def test_cases_that_are_not_fast_are_slow() -> None:
    items: list[Any] = [*(Item(case, fast=("a", "c")) for case in "abc"), Item("d")]
    for item in items:
        mark_slow(item)
    assert [item.added for item in items] == [[], ["slow"], [], []]


def test_slow_cases_are_slow() -> None:
    items: list[Any] = [*(Item(case, slow_cases=("a", "c")) for case in "abc"), Item("d")]
    for item in items:
        mark_slow(item)
    assert [item.added for item in items] == [["slow"], [], ["slow"], []]


@pytest.mark.parametrize("marker", ["fast", "slow_cases"])
def test_names_without_a_case_are_found(marker: str) -> None:
    items: list[Any] = [*(Item(case, **{marker: ("a", "c")}) for case in "ab"), Item("d")]
    assert names_without_case(items) == ["tests/test_a.py::test_x[c]"]
    assert names_without_case([*items, Item("c", **{marker: ("a", "c")})]) == []


@pytest.mark.fast("1")
@pytest.mark.parametrize("number", [1, 2])
def test_this_session_marks_them(request: pytest.FixtureRequest, number: int) -> None:
    assert (request.node.get_closest_marker("slow") is not None) == (number == 2)
