"""Every program has the imports that it needs: it runs in a process that has imported nothing of this repository."""

import os
import subprocess
from pathlib import Path

import pytest
from support.programs import python

ROOT = Path(__file__).parents[2]
PROGRAMS = [
    ROOT / "pretrain_gpt.py",
    *(file for file in sorted((ROOT / "tools").rglob("*.py")) if "__main__" in file.read_text()),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_help(program: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python(fresh=True), str(program), "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr
