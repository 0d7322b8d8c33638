"""The tool that checks a layout, as a command: equal runs, runs that cannot be, runs that fail."""

import os
import re
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from support.processes import run_on_ranks
from support.programs import python

from megatron.core.exceptions import UserError
from megatron.diagnosis.layout_check.layout_trace import LayoutTrace
from tools.verify_layout import load_script, main, trace_of_rank

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "verify_layout.py"
RUN = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"


def verify(own: str, flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [python(), str(TOOL), *own.split(), "--", *RUN.split(), *flags.split()]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=480)


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


def trace_here(script: Path, words: list[str], steps: int) -> LayoutTrace:
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    with mock.patch.dict(os.environ, {"WORLD_SIZE": str(size), "RANK": str(rank)}):  # as torchrun sets them
        return trace_of_rank(script, words, steps)


def run_in_pool(script: Path, words: list[str], world_size: int, steps: int, folder: Path) -> list[LayoutTrace]:
    """Replaces the tool's `run`, which starts new processes."""
    if world_size == 1:
        return [trace_here(script, words, steps)]
    return run_on_ranks(trace_here, world_size, script, words, steps)


def test_a_model_of_ones_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    own = f"--script {ROOT}/examples/custom_model/pretrain_custom.py --processes 2 --steps 1 --"
    flags = (
        "--micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0 --convolution-width 3 --normalization RMSNorm"
    )
    monkeypatch.setattr("tools.verify_layout.run", run_in_pool)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(f"{own} {RUN} {flags} --normalization RMSNorm --tensor-model-parallel-size 2".split()) == 0
    printed = capsys.readouterr().out
    assert "outputs of layers are not compared" in printed and "equal: " in printed


def test_a_script_without_providers_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script_without_providers.py"
    script.write_text("def build_model(): ...")
    with pytest.raises(UserError, match=r"the script has no build_datasets, build_forward_step; it must define"):
        load_script(script)
    with pytest.raises(UserError, match=r"--script .*: no such Python file"):
        load_script(tmp_path / "missing.py")


def test_what_a_script_lacks_is_taken_from_the_entry_script_that_it_imports(tmp_path: Path) -> None:
    script = tmp_path / "script_with_another_model.py"
    script.write_text("import pretrain_gpt\n\n\ndef build_model(context, stage): ...")
    loaded = load_script(script)
    assert loaded.providers.build_model.__module__ == "script_with_another_model"
    assert loaded.providers.build_datasets.__module__ == "pretrain_gpt"
    assert loaded.note == (f"--script {script}: build_datasets, build_forward_step of pretrain_gpt, which it imports")
    assert load_script(ROOT / "pretrain_bert.py").note is None


def test_the_examples_of_the_page_on_extending_can_be_checked(tmp_path: Path) -> None:
    page = (ROOT / "docs/extending.md").read_text("utf-8")
    scripts = [text for text in re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S) if "pretrain(" in text]
    assert len(scripts) > 1
    for number, text in enumerate(scripts):
        (tmp_path / f"example_{number}.py").write_text(text)
        load_script(tmp_path / f"example_{number}.py")
