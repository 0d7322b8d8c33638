"""tests/README.md quotes tests that exist, and its commands select tests."""

import re
from pathlib import Path

from parity.cells import quick_cells
from parity.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "tests/README.md").read_text(encoding="utf-8")


def test_examples_are_quotations() -> None:
    examples = re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, flags=re.M | re.S)
    assert len(examples) == PAGE.count("```python") >= 2
    assert [file for file, code in examples if code not in (ROOT / file).read_text(encoding="utf-8")] == []


def test_helpers_of_the_table_are_defined() -> None:
    table = "".join(line for line in PAGE.splitlines() if line.startswith("|"))
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/support").glob("*.py"))
    named = re.findall(r"`(\w+)(?:\(\))?`", table)
    assert len(named) > 5
    assert [name for name in named if f"\ndef {name}(" not in source and name != "bash"] == []


def test_selected_cells_and_bugs_exist() -> None:
    names = {cell.name for cell in quick_cells()} | {mutation.name for mutation in MUTATIONS}
    selected = re.findall(r"-k \"?([^\s\"]+)", PAGE)
    assert len(selected) == 2 and names >= set(selected)
