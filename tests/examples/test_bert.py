"""examples/bert and examples/t5 prepare a text, train on it, resume; losses fall, and BERT's sizes are the paper's."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.ports import free_port
from support.programs import commands

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PREPARED = ("pages.jsonl", "text_text_sentence.bin", "text_text_sentence.idx", "vocabulary/vocab.txt")


def run(family: str, folder: Path, *flags: str, size: str = "tiny") -> str:
    path = f"{commands()}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "SIZE": size, "OMP_NUM_THREADS": "1"}
    own |= {"GPUS_PER_NODE": "1", "TP": "1"} if family == "bert" else {}  # T5 has a stage for each stack
    done = subprocess.run(
        [EXAMPLES / f"{family}/train_{family}.sh", folder, "SAMPLE", *flags],
        env={**os.environ, **own, "MASTER_PORT": str(free_port())},
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
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_it_prepares_trains_and_resumes(family: str, tmp_path: Path) -> None:
    flags = ("--lr", "3e-3", "--train-iters", "24", "--log-interval", "1", "--num-workers", "0", "--eval-iters", "1")
    flags += ("--micro-batch-size", "16" if family == "bert" else "8")
    first = losses(run(family, tmp_path / "c", *flags, "--exit-interval", "16"))
    assert family != "bert" or all((tmp_path / "c/data" / name).stat().st_size for name in PREPARED)
    second = run(family, tmp_path / "c", *flags)
    assert "loaded checkpoint of iteration      16" in second and ("sop loss" in second) == (family == "bert")
    seen = {**first, **losses(second)}
    assert sorted(seen) == list(range(1, 25))
    assert sum(seen[at] for at in range(20, 25)) / 5 < seen[1] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("size", "parameters"), [("base", 110_106_428), ("large", 336_226_108)])
def test_sizes_are_those_of_the_paper(size: str, parameters: int, tmp_path: Path) -> None:
    """With the final norm that Megatron-LM's norms need in place of the embedding's."""
    said = run("bert", tmp_path / "c", "--dry-run", "--vocab-size", "30522", size=size)
    assert f"parameters  {parameters:,}; " in said
