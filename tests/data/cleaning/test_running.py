"""megatron/data/cleaning/running.py: tasks in processes, and a folder that stays only when it is of use."""

import os
import signal

import pytest

from megatron.core.exceptions import UserError
from megatron.data.cleaning.running import WorkerKilled, run_tasks, working_folder


@pytest.mark.parametrize("workers", [1, 3])
def test_tasks_run_once_and_the_first_error_counts(tmp_path, workers):
    run_tasks(7, workers, lambda task: (tmp_path / str(task)).touch(exist_ok=False))
    assert len(list(tmp_path.iterdir())) == 7

    def fail(task):
        if task >= 2:
            raise UserError(f"task {task}")

    with pytest.raises(UserError, match="task 2"):
        run_tasks(7, workers, fail)


def test_a_killed_worker_is_told(tmp_path):
    with (
        pytest.raises(UserError, match=r"use fewer --workers; the finished part is kept in .*continues from there"),
        working_folder(tmp_path / "out", "id", print) as folder,
    ):
        run_tasks(3, 2, lambda task: os.kill(os.getpid(), signal.SIGKILL))
    assert folder.exists()
    with pytest.raises(WorkerKilled):
        run_tasks(2, 2, lambda task: os.kill(os.getpid(), signal.SIGKILL))


def test_the_folder_goes_after_success_and_mistakes(tmp_path):
    warnings: list[str] = []
    with working_folder(tmp_path / "out", "id", warnings.append) as folder:
        assert folder.is_dir()
    assert not folder.exists()
    with pytest.raises(UserError, match="wrong"), working_folder(tmp_path / "out", "id", warnings.append):
        raise UserError("wrong")
    assert not folder.exists() and not warnings
    with pytest.raises(KeyboardInterrupt), working_folder(tmp_path / "out", "id", warnings.append):
        raise KeyboardInterrupt
    assert folder.exists()
    with working_folder(tmp_path / "out", "other", warnings.append):
        pass
    assert len(warnings) == 1 and ".out.cleaning.id: left by a killed run" in warnings[0]
