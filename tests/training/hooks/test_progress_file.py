"""--log-progress: lines of progress.txt."""

from datetime import datetime
from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.training.hooks.progress_file import ProgressFile
from megatron.training.state import TrainState


def progress(folder: Path, state: TrainState) -> ProgressFile:
    return ProgressFile(folder, state, 4, now=lambda: datetime(2026, 1, 2, 3, 4, 5))


def test_lines_of_two_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    state = TrainState()
    hook = progress(tmp_path / "run", state)
    hook.on_start(0)
    state.consumed_tokens, state.floating_point_operations_so_far = 2_500_000_000, 3e15
    hook.after_save(10)
    hook.on_exit(12)
    progress(tmp_path / "run", state).on_start(12)
    lines = (tmp_path / "run/progress.txt").read_text().splitlines()
    head = "2026-01-02 03:04:05\tJob ID: 77\t# GPUs: 4\t"
    assert lines[0] == lines[3] == f"{head}Starting job"
    assert lines[1].startswith(f"{head}Saved checkpoint\tIteration: 10\tJob throughput: ")
    assert lines[1].endswith(" TFLOP/s/GPU\tFloating-point operations: 3.00e+15\tTokens (in billions): 2.50")
    ending = "Floating-point operations: 3.00e+15\tTokens (in billions): 2.50"
    assert lines[2] == f"{head}Ending job\tIteration: 12\t{ending}"
    assert len(lines) == 4


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    hook = progress(tmp_path / "file", TrainState())
    with pytest.raises(UserError, match=r"--log-progress: .*file/progress.txt: "):
        hook.on_start(0)
    hook.on_exit(3)  # later failures do not end the run
    assert "WARNING: --log-progress: " in capsys.readouterr().out
