"""megatron/data/cleaning/running.py: tasks in processes."""

import os
import signal

import pytest

from megatron.core.exceptions import UserError
from megatron.data.cleaning.running import run_tasks
from megatron.data.preparation.resuming import Unfinished, working_folder


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
        working_folder(str(tmp_path / "out"), "--output", "cleaning.id", print) as working,
    ):
        run_tasks(3, 2, lambda task: os.kill(os.getpid(), signal.SIGKILL))
    assert working.path.exists()
    with pytest.raises(Unfinished):
        run_tasks(2, 2, lambda task: os.kill(os.getpid(), signal.SIGKILL))
