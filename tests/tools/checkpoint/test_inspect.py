"""tools/checkpoint/inspect.py: what a checkpoint holds."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import make_chunk

from megatron.core.dist_checkpointing.chunk import optimizer_state_name
from megatron.core.dist_checkpointing.writing import save
from tools.checkpoint.inspect import main

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "checkpoint" / "inspect.py"


@pytest.fixture
def root(tmp_path):
    chunks = [make_chunk("w", (3, 4)), make_chunk(optimizer_state_name("exp_avg", "w"), (3, 4))]
    for step in (10, 20):
        common = {"train_state": {"iteration": step}, "scheduler": {}, "optimizer": None}
        save(tmp_path, chunks, step=step, common=common, config={"command_line": ["--lr", "0.1"]}, layout={"tp": 1})
    return tmp_path


@pytest.mark.slow
def test_as_a_user_runs_it(root):
    """From its own folder, where it has the name of Python's inspect."""
    command = [sys.executable, SCRIPT.name, "--load", root, "--tensors", "w*"]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, timeout=480)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:-1] == [
        "written by: world_size 1, tp 1",
        "weights: 1 tensors, 12 elements",
        "optimizer state: 1 tensors, 12 elements",
        'train_state: {"iteration": 20}',
        "scheduler: {}",
        "optimizer: null",
        "flags: --lr 0.1",
    ]
    assert done.stdout.splitlines()[-1].split() == ["w", "float32", "[3,", "4]"]


def test_an_older_one_and_all_tensors(root, capsys):
    assert main(["--load", str(root), "--iteration", "10", "--tensors"]) == 0
    out = capsys.readouterr().out
    assert 'train_state: {"iteration": 10}' in out and "optimizer.exp_avg.w" in out


def test_wrong_use(root, tmp_path, capsys):
    assert main(["--load", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"error: --load {tmp_path / 'nowhere'}: no such folder\n"
    assert main(["--load", str(root), "--iteration", "15"]) == 2
    assert capsys.readouterr().err == f"error: {root} has no checkpoint of iteration 15; it has: 10, 20\n"
    with pytest.raises(SystemExit, match="2"):
        main([])
