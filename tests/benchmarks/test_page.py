"""docs/benchmarks.md has the tables that benchmarks/page.py makes of the rows that were measured."""

import re

import pytest

from benchmarks import page


def test_tables_are_those_of_the_results() -> None:
    """To write them anew: python benchmarks/page.py"""
    text = page.PAGE.read_text("utf-8")
    assert text == page.filled(text)
    places = [place[2] for place in page.PLACE.finditer(text)]
    assert len(places) == len(set(places)) and {*page.MADE_OF_ROWS} <= {*places}
    further = {*page.read_subjects()} - {*places}  # the page names the subjects that it leaves to the file
    assert not [name for name in further if name not in " ".join(text.split())]


def test_every_subject_has_command_machine_and_date() -> None:
    for name, found in page.read_subjects().items():
        assert (
            "command" in (*found, *found["columns"]) and found["machine"] and re.match(r"2026-\d\d-\d\d", found["date"])
        ), name
        assert {len(row) for row in found["rows"]} == {len(found["columns"])}, name
    (row,) = [row for row in page.read_rows() if row["cell"] == "GPT125M" and row["layout"] == "1"]
    assert row["flags"] and row["date"] and row["device"] == "NVIDIA H200"


def test_the_newest_row_of_a_cell_counts() -> None:
    cells = [line.split(" | ") for line in page.beside_the_anchor().splitlines()[2:] if line.startswith("|")]
    assert len({(name, precision) for name, _, precision, *_ in cells}) == len(cells) > 15
    (cell,) = [cell for cell in cells if cell[0] == "| MOE64" and cell[2] == "bf16"]
    assert cell[7] == "1.500", "rows of 1.417, 1.321, 1.308, 1.205 and 1.462 are older"


def test_a_place_without_a_table_is_an_error() -> None:
    with pytest.raises(KeyError):
        page.filled("<!-- table: nothing -->\n<!-- end -->")
    assert page.table_of(("a", "b"), [(1, "")]) == "| a | b |\n|---|---|\n| 1 |  |\n"
