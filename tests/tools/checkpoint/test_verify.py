"""tools/checkpoint/verify.py: which checkpoints are whole, what is broken in the others, and the exit code."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import make_chunk

from megatron.core.dist_checkpointing.writing import save
from tools.checkpoint.verify import main

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "checkpoint" / "verify.py"


@pytest.fixture
def root(tmp_path):
    for step in (10, 20):
        save(tmp_path, [make_chunk("w", (3, 4))], step=step, common={}, config={}, layout={})
    return tmp_path


@pytest.mark.slow
def test_as_a_user_runs_it(root):
    """From its own folder, where another tool has the name of Python's inspect."""
    done = subprocess.run(
        [sys.executable, SCRIPT.name, "--load", root], cwd=SCRIPT.parent, capture_output=True, text=True, timeout=480
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(" (")[0] for line in done.stdout.splitlines()] == [
        "iter_0000010: whole",
        "iter_0000020: whole",
        "a run would load iter_0000020",
    ]


def test_a_broken_tensor(root, capsys):
    path = root / "iter_0000020" / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["--load", str(root)]) == 1
    out = capsys.readouterr().out
    assert f"iter_0000020: BROKEN\n  {path}: the bytes of w from byte" in out
    assert out.endswith("a run would load iter_0000010\n")
    assert main(["--load", str(root), "--quick"]) == 0  # tensors are not read
    assert main(["--load", str(root), "--iteration", "10"]) == 0
    assert main(["--load", str(root), "--iteration", "20"]) == 1


def test_a_file_that_is_gone(root, capsys):
    (root / "iter_0000010" / "rank_00000.json").unlink()
    assert main(["--load", str(root), "--quick"]) == 1
    out = capsys.readouterr().out
    assert "iter_0000010: BROKEN\n" in out and "rank_00000.json: No such file" in out


def test_a_tracker_that_is_wrong_is_told(root, capsys):
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    assert main(["--load", str(root)]) == 0
    assert "says 7, which does not exist" in capsys.readouterr().out


def test_wrong_use(root, tmp_path, capsys):
    assert main(["--load", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"error: --load {tmp_path / 'nowhere'}: no such folder\n"
    assert main(["--load", str(root), "--iteration", "15"]) == 2
    assert capsys.readouterr().err == f"error: {root} has no checkpoint of iteration 15; it has: 10, 20\n"
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_another_programs_checkpoint(tmp_path, capsys):
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001" / "__0_0.distcp").write_bytes(b"")
    assert main(["--load", str(tmp_path)]) == 2
    assert "another program's checkpoint" in capsys.readouterr().err
