"""Markers of parametrized tests that leave some of their cases to `make test-all`.

    @pytest.mark.fast("tp2", "pp2")  # the others are slow
    @pytest.mark.parametrize("layout", LAYOUTS)

    @pytest.mark.slow_cases("tp4")  # the others are fast
    @pytest.mark.parametrize("layout", LAYOUTS)

A name is the text in brackets of a test's id, as `pytest --collect-only` prints it.
"""

from collections import defaultdict
from collections.abc import Iterable

import pytest


def mark_slow(item: pytest.Item) -> None:
    """Marks the item slow if a marker of its test leaves it to `make test-all`."""
    fast, slow = item.get_closest_marker("fast"), item.get_closest_marker("slow_cases")
    if (fast is not None and _case(item) not in fast.args) or (slow is not None and _case(item) in slow.args):
        item.add_marker("slow")


def names_without_case(items: Iterable[pytest.Item]) -> list[str]:
    """Returns the names in markers that no case has, each behind its test. `items` has all cases of each test."""
    named: dict[str, set[str]] = defaultdict(set)
    cases: dict[str, set[str]] = defaultdict(set)
    for item in items:
        for marker in (item.get_closest_marker("fast"), item.get_closest_marker("slow_cases")):
            if marker is not None:
                test = item.nodeid.partition("[")[0]
                named[test].update(marker.args)
                cases[test].add(_case(item))
    return [f"{test}[{name}]" for test in named for name in sorted(named[test] - cases[test])]


def _case(item: pytest.Item) -> str:
    case: str = item.callspec.id  # type: ignore[attr-defined]
    return case
