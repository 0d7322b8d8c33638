"""benchmarks/transformers_kit counts as bench.py does."""

import sys

import pytest

from benchmarks.bench_cells import CELLS
from benchmarks.page import cell_of, read_rows
from benchmarks.transformers_kit import train


@pytest.mark.parametrize("cell", ["LLAMA1B", "LLAMA8B_12L"])
def test_model_flops_are_those_of_our_rows(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = [row for row in read_rows() if cell_of(row) == (cell, "bf16", "")]
    monkeypatch.setattr(sys, "argv", ["train.py", *CELLS[cell].split(), "--bf16", "--train-iters", "1"])
    ours = row["ours"]["tflops"] * 1e9 * row["ours"]["milliseconds"]
    assert train.step_flops(train.read_flags()) == pytest.approx(ours, rel=1e-3)
