"""Whole programs that strangers wrote against Megatron-LM's documentation (programs/) run here as they are."""

import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
from support.launch import launch

PROGRAMS = Path(__file__).parent / "programs"


def run(name: str) -> None:
    sys.argv[0] = str(PROGRAMS / name)
    runpy.run_path(sys.argv[0], run_name="__main__")


def printed(folder: Path, name: str, flags: str, ranks: int) -> str:
    """What all ranks print together."""
    program = launch(flags, ranks, folder, partial(run, name), base="")
    codes = program.exit_codes(200.0)
    text = "".join(program.output(rank) for rank in range(max(ranks, 1)))
    assert set(codes) == {0}, (codes, text)
    return text


def losses(text: str, pattern: str = r"iteration \d+ loss (\S+)") -> list[float]:
    return [float(loss) for loss in re.findall(pattern, text)]


@pytest.mark.fast("--tp 2 --pp 1")
@pytest.mark.parametrize("layout", ["--tp 2 --pp 1", "--tp 1 --pp 2"])
def test_a_model_and_a_loop_of_its_own(layout: str, tmp_path: Path) -> None:
    text = printed(tmp_path / "run", "own_model.py", f"{layout} --iters 6 --ckpt {tmp_path}/kept", 2)
    found = losses(text)
    assert len(found) == 6 and found[-1] < found[0] - 0.3
    assert text.count("checkpoint restored") == 2
