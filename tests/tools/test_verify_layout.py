"""The tool that checks a layout, as a command: equal runs, runs that cannot be, runs that fail."""

import os
import subprocess
from pathlib import Path

from support.programs import python

TOOL = Path(__file__).resolve().parents[2] / "tools" / "verify_layout.py"
RUN = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"


def verify(own: str, flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [python(), str(TOOL), *own.split(), "--", *RUN.split(), *flags.split()]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280)


def test_a_layout_that_is_right() -> None:
    done = verify("--processes 2 --steps 1", "--pipeline-model-parallel-size 4 --micro-batch-size 1", WORLD_SIZE="8")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("layout: tensor 1 x context 1 x pipeline 2 x data 1 instead of")
    assert "1 steps in 2 processes" in done.stdout and lines[-1].startswith("equal: ")


def test_a_run_that_cannot_be() -> None:
    done = verify("", "--tensor-model-parallel-size 3")
    assert done.returncode == 2 and "error: --tensor-model-parallel-size 3" in done.stderr
    done = verify("", "--micro-batch-size 1", WORLD_SIZE="1")
    assert done.returncode == 2 and "there is one rank, and so nothing to compare" in done.stderr
