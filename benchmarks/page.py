"""Writes the tables of docs/benchmarks.md:   python benchmarks/page.py

The page has a place for each table: `<!-- table: NAME -->` ... `<!-- end -->`. Tables of speed beside the anchor come
from results/h200.json, which compare.sh fills: the newest row of each cell. All others are subjects of
results/subjects.json.
"""

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/benchmarks.md"
PLACE = re.compile(r"(<!-- table: (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Row = Mapping[str, Any]


def read_rows(having: str = "milliseconds") -> list[Row]:
    """Returns the newest row of each cell that has this figure of ours, by number of GPUs and then by first rows."""
    newest: dict[tuple[str, ...], Row] = {}
    for row in json.loads((ROOT / "benchmarks/results/h200.json").read_text("utf-8")):
        if row["ours"].get(having):
            newest[cell_of(row)] = row
    return sorted(newest.values(), key=lambda row: row["gpus"])


def cell_of(row: Row) -> tuple[str, str, str]:
    """Returns what rows of one cell share: its name with the layout, the precision, and details of the data."""
    return _name(row), _precision(row), _details({**row, "zipf": 1})


def read_subjects() -> dict[str, Row]:
    """Returns the subjects by name."""
    return {found["subject"]: found for found in json.loads((ROOT / "benchmarks/results/subjects.json").read_text())}


def _name(row: Row) -> str:
    return row["cell"] if row["layout"] == "1" else f"{row['cell']}/{row['layout']}"


def _precision(row: Row) -> str:
    recipe = re.search(r"--fp8-recipe (\w+)", row["flags"])
    return f"fp8 {recipe[1]}" if recipe else row["precision"]


def _details(row: Row) -> str:
    details = [f"packed documents of {row['documents']:.0f} tokens"] if row.get("documents") else []
    details += ["equal loads of experts"] if "--moe-router-force-load-balancing" in row["flags"] else []
    details += ["tokens with equal frequencies"] if not row["zipf"] else []
    return "".join(f", {detail}" for detail in details)


def _peaks(ours: Row) -> str:
    predicted = ours.get("predicted_peak_memory_gb")
    return f"{ours['peak_memory_gb']:.1f}" + ("" if predicted is None else f" ({predicted:.1f})")


def beside_the_anchor() -> str:
    """Returns the table of speeds beside the anchor, and notes on its rows."""
    columns = ("cell", "GPUs", "precision", "ms, ours", "anchor", "TFLOP/s, ours", "anchor", "ratio")
    table, notes = [], []
    for row in read_rows():
        ours, anchor = row["ours"], row["anchor"]
        if anchor is None:
            continue
        speeds = [f"{side['milliseconds']:.1f}" for side in (ours, anchor)]
        speeds += [f"{side['tflops']:.1f}" for side in (ours, anchor)]
        memory = f"{_peaks(ours)}, {anchor['peak_memory_gb']:.1f}"
        start = [_name(row) + _details(row), row["gpus"], _precision(row)]
        table.append([*start, *speeds, f"{row['ratio']:.3f}", memory, row["date"]])
        if "note" in row:
            notes.append(textwrap.fill(f"- {start[0]}: {row['note']}.", 118, subsequent_indent="  ") + "\n")
    return (
        table_of([*columns, "peak GB, ours (predicted), anchor", "date"], table) + "\n" * bool(notes) + "".join(notes)
    )


def without_an_anchor() -> str:
    """Returns the table of speeds of cells that the anchor was not measured for."""
    table = []
    for row in read_rows():
        if row["anchor"] is None:
            ours = row["ours"]
            step = f"{ours['milliseconds']:.1f} ({ours['fastest']:.0f} to {ours['slowest']:.0f})"
            table.append([_name(row), step, f"{ours['tflops']:.1f}", _peaks(ours), row["date"], row["note"]])
    return table_of(("cell", "ms", "TFLOP/s", "peak GB (predicted)", "date", "note"), table)


def floors() -> str:
    """Returns the table of how fast each step could be."""
    bytes_moved = ("memory-bound operations", "casts to fp8", "update of the weights")
    parts = ("products", "attention", "state space", *bytes_moved)
    table = []
    for row in read_rows("floor_parts"):
        ours, of_part = row["ours"], row["ours"]["floor_parts"]
        assert of_part.keys() <= set(parts)
        times = [f"{of_part[part]:.1f}" if part in of_part else "" for part in parts]
        floor, step = ours["floor_milliseconds"], ours["milliseconds"]
        cell = f"{_name(row)}{_details(row)}, {_precision(row)}"
        table.append([cell, *times, f"{floor:.1f}", f"{step:.1f}", f"{floor / step:.1%}", row["date"]])
    return table_of(("cell", *parts, "floor", "step", "floor / step", "date"), table)


def subject(name: str) -> str:
    """Returns a subject: how it was measured, and its table."""
    found = read_subjects()[name]
    command = f"`{found['command']}`, " if "command" in found else ""
    head = f"{command}{found['machine']}, {found['date']}. {found.get('note', '')}".rstrip()
    return f"{textwrap.fill(head, 118, break_on_hyphens=False)}\n\n{table_of(found['columns'], found['rows'])}"


def table_of(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table in Markdown."""
    lines = [f"| {' | '.join(map(str, cells))} |\n" for cells in (columns, *rows)]
    return "".join([lines[0], f"|{'---|' * len(columns)}\n", *lines[1:]])


MADE_OF_ROWS: Mapping[str, Callable[[], str]] = {
    "speed beside the anchor": beside_the_anchor,
    "speed without an anchor": without_an_anchor,
    "floors": floors,
}


def filled(page: str) -> str:
    """Returns the page with its tables written anew. Raises KeyError for a place of an unknown table."""

    def table(place: re.Match[str]) -> str:
        name = place[2]
        return f"{place[1]}{MADE_OF_ROWS[name]() if name in MADE_OF_ROWS else subject(name)}{place[4]}"

    return PLACE.sub(table, page)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
