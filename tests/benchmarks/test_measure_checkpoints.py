"""benchmarks/measure_checkpoints.py saves a run of two ranks, loads it into another layout and compares all bits."""

import re
import sys
from pathlib import Path

from support.launch import launch

from benchmarks.measure_checkpoints import main

TINY = (
    "GPT125M --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 4 --vocab-size 50 --num-workers 0 --plain-gigabytes 0.001"
)
LAYOUTS = "--use-distributed-optimizer", "--tensor-model-parallel-size 2 --sequence-parallel"


def measure() -> None:
    assert main([*TINY.split(), *sys.argv[1:], *(f"--layout={layout}" for layout in LAYOUTS)]) == 0


def test_rows_of_two_layouts(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    program = launch(f"--folder {tmp_path / 'scratch'}", 2, tmp_path / "out", measure, base="")
    assert program.exit_codes() == [0, 0], program.output(0) + program.output(1)
    rows = [line for line in program.output(0).splitlines() if "GB/s" in line]
    assert len(rows) == 9 and not [line for line in program.output(1).splitlines() if "GB/s" in line]
    assert re.search(r"save of 0\.00\d+ GB by 2 ranks", rows[1]) and "% of the save" in rows[3]
    assert [row.split(" | ")[0] for row in rows[5:]] == [
        f"| load from the {source} into `{layout}`" for layout in LAYOUTS for source in ("page cache", "disk")
    ]
    assert list((tmp_path / "scratch").iterdir()) == []
