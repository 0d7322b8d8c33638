"""Generates the tables of docs/parity.md; `PYTHONPATH=tests:. python -m parity.page` writes them."""

from collections.abc import Callable
from pathlib import Path

from parity.cells import quick_cells, slow_cells
from parity.families import FAMILIES, Family
from parity.layouts import DIMENSIONS, FURTHER
from parity.mutations import PARTS

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"


def cells() -> str:
    most = max(cell.layout.ranks for cell in quick_cells())
    return (
        f"`make test` has {len(quick_cells())} cells of up to {most} ranks, `make test-all` {len(slow_cells())} more."
    )


def dimensions() -> str:
    lines = ["| dimension | tested in all pairs | tested alone or with a few others |", "|---|---|---|"]
    for name, choices in DIMENSIONS.items():
        special = ", ".join(f"`{choice.name}`" for choice in FURTHER[name])
        lines.append(f"| {name} | {', '.join(f'`{choice.name}`' for choice in choices)} | {special} |")
    return "\n".join(lines)


def families() -> str:
    lines = ["| family | models | covered pairs |", "|---|---|---|"]
    for family in FAMILIES:
        names = ", ".join(f"`{model.name}`" for model in family.models)
        values = ", ".join(f"`{value.name}`" for choices in family.dimensions.values() for value in choices[1:])
        lines.append(f"| {family.name} | {names} | {_pairs(family)} of {values} |")
    return "\n".join(lines)


def _pairs(family: Family) -> str:
    if not family.centres:
        return "all pairs"
    centres = {"experts": "each split of experts", "model": "each model"}
    return f"{' and '.join(centres[centre] for centre in family.centres)} with each"


def mutations() -> str:
    lines = ["| part | bugs | for example | caught by `test_layout[...]` |", "|---|---|---|---|"]
    for part, bugs in PARTS.items():
        example = next((bug for bug in bugs if bug.quick), bugs[0])
        lines.append(f"| {part} | {len(bugs)} | {example.story} | `{example.caught_by}` |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "cells": cells,
    "dimensions": dimensions,
    "families": families,
    "mutations": mutations,
}


def with_tables(page: str) -> str:
    """Returns the page with its tables generated anew."""
    for name, table in TABLES.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert begin and end, name
        page = f"{before}{begin}{table()}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
