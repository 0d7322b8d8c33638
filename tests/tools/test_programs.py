"""Every program has the imports that it needs: it runs in a process that has imported nothing of this repository."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import python

ROOT = Path(__file__).parents[2]
TOOLS = sorted((ROOT / "tools").rglob("*.py"))
PARTS = [file for file in TOOLS if "is a part of another program" in file.read_text()]
MEASURING = [file for file in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in file.read_text()]
PROGRAMS = [ROOT / "pretrain_gpt.py", *(file for file in TOOLS if file not in PARTS)]


@pytest.mark.parametrize(
    "program",
    [*PROGRAMS, *(pytest.param(file, marks=pytest.mark.slow) for file in MEASURING)],
    ids=lambda program: program.stem,
)
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


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.stem)
def test_a_part_of_a_program_names_the_program(part: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(part), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    (sentence,) = done.stderr.splitlines()
    assert done.returncode == 1 and not done.stdout
    program = re.fullmatch(r"This file is a part of another program; run: python (tools/\w+\.py) .*", sentence)
    assert program is not None and ROOT / program[1] in PROGRAMS
    assert re.search(rf"^(from|import) tools\.{part.stem}\b", (ROOT / program[1]).read_text(), re.M)
