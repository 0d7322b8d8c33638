"""Two runs never write into one folder, and the folder of a run that has ended is free."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support.launch import launch
from support.processes import run_on_ranks
from support.runs import GPT, train

from megatron.core.exceptions import UserError
from megatron.launcher import start_time
from megatron.training import pretrain
from megatron.training.launch import errors, lease
from megatron.training.launch.lease import FILE, Holder, Lease

FLAGS = "--mock-data --train-iters 1"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "SILENCE", 0.3)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


class Other:
    """The lease of a process that a test makes up."""

    def __init__(self, folder: Path, **facts: object) -> None:
        self.lease = Lease(folder, lambda text: None)
        self.lease.mine = dataclasses.replace(self.lease.mine, **facts)  # type: ignore[arg-type]
        self.lease.take()


def taken(folder: Path) -> list[str]:
    """Takes the lease and returns what is said about it."""
    said: list[str] = []
    mine = Lease(folder, said.append)
    mine.take()
    assert json.loads((folder / FILE).read_text())["token"] == mine.mine.token
    return said


def test_a_lease_that_was_given_back_is_free(tmp_path: Path) -> None:
    mine = Lease(tmp_path / "new" / "folder", print)
    mine.take()
    assert mine.renew() is None
    mine.give_back()
    assert not mine.path.exists() and taken(tmp_path) == []


def test_a_living_process_of_this_machine_is_refused_by_name(tmp_path: Path) -> None:
    parent = os.getppid()
    Other(tmp_path, pid=parent, began=start_time(parent), host="here")
    wanted = f"process {parent} on here writes into .* already: it lives, and has held .*{FILE} for 0 s; end it on here"
    with pytest.raises(UserError, match=wanted):
        Lease(tmp_path, print).take()


@pytest.mark.parametrize("again", [False, True])
def test_a_process_of_this_machine_that_has_ended_is_not_waited_for(tmp_path: Path, again: bool) -> None:
    """Another process may have its number now."""
    pid, began = (os.getppid(), 1) if again else (2**22 + 1, 1)
    Other(tmp_path, pid=pid, began=began, host="here")
    assert taken(tmp_path) == [
        f"{tmp_path / FILE}: process {pid} on here did not give this lease back and is gone; this run takes it over"
    ]


JOBS = [
    ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, ("slurm 7", 0), True),
    ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, ("slurm 7", 1), False),
    ({"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, ("slurm 7", 0), False),
    ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "2"}, ("torchrun a", 1), True),
    ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}, (None, 0), False),
]


@pytest.mark.parametrize(("variables", "job", "at_once"), JOBS)
def test_an_earlier_start_of_the_same_job_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], job: tuple[str, int], at_once: bool
) -> None:
    Other(tmp_path, machine="another", host="there", pid=12, job=job[0], attempt=job[1])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ("watches" in taken(tmp_path)[0]) == (not at_once)


def test_a_silent_process_of_another_machine_is_watched_and_taken_over(tmp_path: Path) -> None:
    other = Other(tmp_path, machine="another", host="there", pid=12).lease
    assert taken(tmp_path) == [
        f"{tmp_path / FILE}: process 12 on there holds this lease; this run watches for 0.3 s whether it is renewed",
        f"{tmp_path / FILE}: process 12 on there has not renewed it for 0.3 s; this run takes it over",
    ]
    lost = other.renew()
    assert lost is not None and f"process {os.getpid()} on " in lost and "has taken over" in lost
    other.give_back()
    assert (tmp_path / FILE).exists()  # that of the other run


def test_a_process_of_another_machine_that_renews_its_lease_is_refused(tmp_path: Path) -> None:
    """The clock of its host does not matter."""
    other = Other(tmp_path, machine="another", host="there", pid=12, since=0.0).lease
    timer = threading.Timer(0.1, other.renew)
    timer.start()
    with pytest.raises(UserError, match=r"process 12 on there writes into .* already: it renewed .* give this run ano"):
        Lease(tmp_path, print).take()
    timer.join()


def test_of_two_runs_that_start_together_one_gets_the_folder(tmp_path: Path) -> None:
    results = run_on_ranks(takes, 4, tmp_path)
    assert sorted(results) == ["refused"] * 3 + ["taken"]


def takes(folder: Path) -> str:
    torch.distributed.barrier()
    try:
        Lease(folder, lambda text: None).take()
    except UserError:
        return "refused"
    finally:
        torch.distributed.barrier()
    return "taken"


def test_a_run_holds_the_leases_of_its_folders_and_gives_them_back(tmp_path: Path) -> None:
    folders = [tmp_path / "saved", tmp_path / "temporary"]
    flags = f"{FLAGS} --save {folders[0]} --non-persistent-save-interval 1 --non-persistent-ckpt-type global"
    held: list[bool] = []
    train(
        f"{flags} --non-persistent-global-ckpt-dir {folders[1]}",
        before=lambda run: held.extend((folder / FILE).exists() for folder in folders),
    )
    assert held == [True, True] and not any((folder / FILE).exists() for folder in folders)


def test_a_folder_without_a_lease_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Lease, how: int = 0) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Lease, "_write", full)
    train(f"{FLAGS} --save {tmp_path}")
    assert f"WARNING: {tmp_path / FILE}: No space left on device; a second run" in capsys.readouterr().err


def test_every_rank_refuses_a_second_run(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-IS", "-c", "input()"], stdin=subprocess.PIPE) as other:
        Other(tmp_path, pid=other.pid, began=start_time(other.pid))
        program = launch(f"{FLAGS} --save {tmp_path}", 2, tmp_path / "ranks", _with_quick_end)
        assert program.exit_codes() == [2, 2]
        assert f"process {other.pid} on " in program.output(0) and "Traceback" not in program.output(0)
        other.kill()


def _with_quick_end() -> None:
    errors._HEAD_START_OF_FIRST_RANK = 0.3
    pretrain(GPT)


def _with_quick_renewal() -> None:
    lease.RENEWAL = 0.1
    pretrain(GPT)


def test_a_run_that_loses_its_lease_ends(tmp_path: Path) -> None:
    save = tmp_path / "saved"
    flags = f"--mock-data --train-iters 1000000 --log-interval 1 --save {save}"
    program = launch(flags, 2, tmp_path / "ranks", _with_quick_renewal)
    _wait(save / "metrics.jsonl")
    holder = dataclasses.replace(Holder.of_this_process(), host="there", pid=12, machine="another")
    (save / FILE).write_text(json.dumps(dataclasses.asdict(holder)))
    assert program.exit_codes(60) == [2, 2]
    assert "error: process 12 on there has taken over" in program.output(0)
    assert "Traceback" not in program.output(0) + program.output(1)
    assert not list(save.glob("iter_*"))


def _wait(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
