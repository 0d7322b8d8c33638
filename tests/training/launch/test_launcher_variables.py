"""Ranks from the variables of SLURM, Open MPI and other MPIs."""

import os
import sys
from pathlib import Path

import pytest
from support.launch import launch
from support.runs import GPT

from megatron.core.exceptions import UserError
from megatron.training import pretrain
from megatron.training.config.settings import tasks_of_node
from megatron.training.launch.launcher_variables import first_host, take_ranks_of_launcher

STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "12",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[01-16]",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
}
OF_STEP = ("9", "12", "1", "4", "gpu07", str(12_000 + (1_234_567 * 31 + 2) % 20_000))
ALONE = (None,) * 6
CASE = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_NNODES": "1"}
BATCH = {**STEP, "SLURM_PROCID": "0", "SLURM_GTIDS": "0", "SLURM_TASK_PID": "77"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, ALONE),
        (STEP, OF_STEP),
        ({**STEP, "SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "3"}, (*OF_STEP[:2], "0", *OF_STEP[3:])),
        ({**STEP, "MASTER_ADDR": "x", "MASTER_PORT": "5"}, (*OF_STEP[:4], "x", "5")),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ALONE),
        # torchrun on each node of a step, a batch script and what it runs, and a shell of salloc
        ({**STEP, "RANK": "0", "WORLD_SIZE": "1"}, ("0", "1", *[None] * 4)),
        (without(BATCH, "SLURM_STEP_ID"), ALONE),
        ({**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFB)}, ALONE),
        (without(STEP, "SLURM_STEP_ID", "SLURM_PROCID"), ALONE),
        ({**CASE, "SLURM_PROCID": "1"}, ("1", "2", "1", None, "127.0.0.1", "12031")),
        ({**CASE, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, ("0", "2", "0", None, "127.0.0.1", "12031")),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("1", "2", "1", "2", "127.0.0.1", "12000")),
        ({**MPI, "MASTER_ADDR": "a", "MASTER_PORT": "6"}, ("1", "2", "1", None, "a", "6")),
        # mpirun in a job starts its own processes by srun, one on each node
        ({**STEP, **MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("1", "2", "1", "2", "127.0.0.1", "12000")),
        ({**STEP, "PMI_RANK": "9", "PMI_SIZE": "12"}, OF_STEP),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
            ("1", "2", "1", "2", "127.0.0.1", "29500"),
        ),
    ],
)
def test_ranks_of_launchers(variables: dict[str, str], wanted: tuple[str | None, ...]) -> None:
    environ = dict(variables)
    take_ranks_of_launcher(environ)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert tuple(environ.get(name) for name in names) == wanted


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (MPI, "mpirun has started 2 processes, but does not say MASTER_ADDR; set MASTER_ADDR .* torchrun .*slurm"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "an MPI launcher has started 2 .* say MASTER_ADDR and MASTER_PORT; "),
        (without(STEP, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "srun has started 12 .* say MASTER_ADDR; set"),
    ],
)
def test_a_launcher_that_says_too_little_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        take_ranks_of_launcher(dict(variables))


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("n[007-010,012],b", "n007"), ("r[1,3]n[2-4].x", "r1n2.x"), ("n[3]", "n3"), ("", None)],
)
def test_the_first_host_of_a_list(nodes: str, host: str | None) -> None:
    assert first_host(nodes) == host


def test_tasks_per_node() -> None:
    assert [tasks_of_node("8(x2),4", str(node)) for node in range(4)] == ["8", "8", "4", None]


def _as_task_of_slurm() -> None:
    rank = os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        del os.environ[name]
    os.environ |= {**CASE, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
    sys.argv += ["--save", sys.argv[-1] + "/saved"]
    pretrain(GPT)


def test_two_tasks_of_srun_are_one_run(tmp_path: Path) -> None:
    program = launch(f"--mock-data --train-iters 1 --data-cache-path {tmp_path}", 2, tmp_path, _as_task_of_slurm)
    assert program.exit_codes() == [0, 0]
    assert "each of 2 ranks holds" in program.output(0) and "each of" not in program.output(1)
    assert (tmp_path / "saved" / "iter_0000001").is_dir()
