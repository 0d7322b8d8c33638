"""examples/t5 prepares a text, trains on it with an encoder stage and a decoder stage, and resumes; the loss falls."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.ports import free_port
from support.programs import commands

SCRIPT = Path(__file__).resolve().parents[2] / "examples/t5/train_t5.sh"


def run(folder: Path, *flags: str) -> str:
    path = f"{commands()}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "SIZE": "tiny", "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [SCRIPT, folder, "SAMPLE", *flags],
        env={**os.environ, **own},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def losses(log: str) -> dict[int, float]:
    return {int(at): float(loss) for at, loss in re.findall(r"iteration +(\d+)/ .* lm loss: (\S+)", log)}


@pytest.mark.slow
def test_it_prepares_trains_and_resumes(tmp_path: Path) -> None:
    flags = ("--lr", "3e-3", "--train-iters", "24", "--log-interval", "1", "--num-workers", "0", "--eval-iters", "1")
    flags += ("--micro-batch-size", "8")
    first = losses(run(tmp_path / "c", *flags, "--exit-interval", "16"))
    second = run(tmp_path / "c", *flags)
    assert "loaded checkpoint of iteration      16" in second
    seen = {**first, **losses(second)}
    assert sorted(seen) == list(range(1, 25))
    assert sum(seen[at] for at in range(20, 25)) / 5 < seen[1] - 0.5
