"""benchmarks/recheck.py compares new rows with the newest recorded ones."""

import copy

from benchmarks.page import cell_of, read_rows
from benchmarks.recheck import compared


def test_a_line_says_how_much_longer_a_step_is() -> None:
    (recorded,) = [row for row in read_rows() if cell_of(row) == ("LLAMA1B", "fp8 tensorwise", "")]
    found = copy.deepcopy(dict(recorded))
    found["ours"]["milliseconds"] = recorded["ours"]["milliseconds"] * 1.1
    line = compared(found, recorded)
    assert line.startswith("LLAMA1B, fp8 tensorwise: ") and line.endswith("; +10.0%") and recorded["date"] in line
    assert compared(found, None).endswith("; no recorded row")
