"""benchmarks/bench_preprocess.py: a small run measures, compares, and says that ids are equal."""

import subprocess
from pathlib import Path

import pytest
from support.programs import python

TOOL = Path(__file__).parents[2] / "benchmarks/bench_preprocess.py"


@pytest.mark.slow
def test_a_small_run():
    flags = ["--megabytes", "1", "--vocab-size", "1000", "--workers", "2", "--repeat", "1"]
    done = subprocess.run([python(), str(TOOL), *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| `tokenizers` in a loop, 1 process | 1 MB in" in done.stdout
    assert "ids compared: all equal" in done.stdout
