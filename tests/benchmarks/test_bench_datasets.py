"""benchmarks/bench_datasets.py runs, at a small size, and measures what it says."""

import subprocess
from pathlib import Path

from support.programs import python

TOOL = Path(__file__).parents[2] / "benchmarks" / "bench_datasets.py"


def test_rows_of_a_table():
    options = [
        "--documents",
        "20000",
        "--sequence-length",
        "64",
        "--sentences",
        "9000",
        "--datasets",
        "8",
        "--samples",
        "1000000",
    ]
    done = subprocess.run([python(), TOOL, *options], capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert rows[:2] == ["| what | measured |", "|---|---|"]
    assert len(rows) == 14
    assert all(row.count("|") == 3 for row in rows)
    for text in (
        "sample index of 2e+04 documents",
        "BERT, 9e+03 sentences in",
        "8 datasets",
        "128 tokens as an s x s mask",
    ):
        assert text in done.stdout
