"""benchmarks/bench_checkpoints.py runs, at a small size, and measures what it says."""

import subprocess
from pathlib import Path

from support.programs import python

TOOL = Path(__file__).parents[2] / "benchmarks" / "bench_checkpoints.py"


def run_tool(*words):
    return subprocess.run([python(), TOOL, *map(str, words)], capture_output=True, text=True, timeout=480)


def test_rows_of_a_table(tmp_path):
    done = run_tool("--folder", tmp_path, "--gigabytes", "0.02")
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert rows[:2] == ["| what | measured |", "|---|---|"] and len(rows) == 8
    assert all(row.count("|") == 3 for row in rows)
    assert sum("MB/s" in row for row in rows) == 5
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path):
    done = run_tool("--folder", tmp_path / "none", "--gigabytes", "0.02")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
