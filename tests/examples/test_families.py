"""The scripts of examples/mixtral and examples/qwen run as they stand, and their sizes are the published models'."""

import os
import re
import subprocess
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest
from support.ports import free_port
from support.programs import commands

from megatron.training.conversion.exporting import export_model
from pretrain_gpt import build_model

ROOT = Path(__file__).resolve().parents[2]
MIXTRAL, QWEN = ROOT / "examples/mixtral/train_mixtral.sh", ROOT / "examples/qwen/train_qwen3.sh"

PARAMETERS = {
    (MIXTRAL, "8x7b"): 46_702_792_704,
    (QWEN, "0.6b"): 596_049_920,
    (QWEN, "8b"): 8_190_735_360,
    (QWEN, "30b-a3b"): 30_532_122_624,
}
"""Of the models on the hub, as their pages and indexes say."""

TINY = {
    (MIXTRAL, "tiny"): "MixtralForCausalLM",
    (QWEN, "tiny"): "Qwen3ForCausalLM",
    (QWEN, "tiny-moe"): "Qwen3MoeForCausalLM",
}


def run(script: Path, size: str, folder: Path, *flags: str, **environment: str) -> str:
    path = f"{commands()}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [script, folder, "MOCK", "MOCK", *flags],
        env={**os.environ, "PATH": path, "SIZE": size, "OMP_NUM_THREADS": "1", **environment},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def each(cases: Iterable[tuple[Path, str]], quick: Container[str]) -> list[Any]:
    """The cases, of which those of these sizes are quick."""
    return [
        pytest.param(script, size, marks=() if size in quick else pytest.mark.slow, id=f"{script.stem}-{size}")
        for script, size in cases
    ]


@pytest.mark.parametrize(("script", "size"), each(PARAMETERS, {"8x7b", "30b-a3b"}))
def test_sizes_are_those_of_the_hub(script: Path, size: str, tmp_path: Path) -> None:
    said = run(script, size, tmp_path / "c", "--dry-run", GPUS_PER_NODE="1", TP="1", EP="1")
    assert f"parameters  {PARAMETERS[script, size]:,}; " in said


@pytest.mark.parametrize(("script", "size"), each(TINY, {"tiny-moe"}))
def test_it_trains_and_goes_on_and_is_of_its_family(script: Path, size: str, tmp_path: Path) -> None:
    """On two processes; what it saved is exported as the family's architecture."""
    port = str(free_port())
    flags = ("--train-iters", "6", "--log-interval", "1", "--num-workers", "0", "--eval-iters", "1")
    first = run(script, size, tmp_path / "c", *flags, "--exit-interval", "3", MASTER_PORT=port)
    assert re.search(r"iteration +3/ +6 .* lm loss: ", first)
    second = run(script, size, tmp_path / "c", *flags, MASTER_PORT=port)
    assert "loaded checkpoint of iteration" in second and re.search(r"iteration +6/ +6 .* lm loss: ", second)
    done = export_model(tmp_path / "c", tmp_path / "theirs", build_model, log=lambda sentence: None)
    assert done.architecture == TINY[script, size]
