"""Several real processes: they find each other, compare themselves, and measure."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.ports import free_port
from support.programs import commands, python

ROOT = Path(__file__).parents[3]
DOCTOR = str(ROOT / "tools/doctor.py")


def torchrun(tmp_path: Path, of_rank_1: str, *words: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs the doctor on two ranks under torchrun; rank 1 runs a line of bash before."""
    path = os.environ["PATH"] if fresh else f"{commands()}{os.pathsep}{os.environ['PATH']}"
    interpreter = sys.executable if fresh else "python"
    script = f'[ $RANK = 1 ] && {{ {of_rank_1}; }}\nexec {interpreter} "$@"\n'
    (tmp_path / "rank.sh").write_text(script)
    start = [sys.executable, "-m", "torch.distributed.run"] if fresh else ["torchrun"]
    command = [*start, "--nproc_per_node", "2", "--master_port", str(free_port()), "--no-python", "bash"]
    return subprocess.run(
        [*command, str(tmp_path / "rank.sh"), DOCTOR, "--folder", str(tmp_path), *words],
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_a_rank_whose_temporary_files_are_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    done = torchrun(tmp_path, f"export TMPDIR={tmp_path}/other")
    assert "2 ranks on 1 host were compared" in done.stdout, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "TMPDIR" in line and line.startswith("warning")]
    assert f"{tmp_path}/other on rank 1" in line and "on rank 0" in line
    assert not [line for line in done.stdout.splitlines() if line.startswith("fault")]
    assert "\nverdict    1: warnings" in done.stdout and done.returncode == 0 and "FAILED" not in done.stderr


@pytest.mark.slow
def test_a_rank_that_may_open_fewer_files(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "ulimit -n 3000", fresh=True)
    assert done.returncode == 0
    assert "3000 on rank 1 (" in next(line for line in done.stdout.splitlines() if "make all ranks alike" in line)
    assert any(
        line.startswith("warning: rank 1 (") and "at most 3000 open files" in line for line in done.stdout.splitlines()
    )


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [python(), DOCTOR, "--wait", "1"],
        env={**os.environ, **environment, "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and done.stderr.startswith("fault: rank 1 of 2 did not start within 1 s")


def test_a_fault_ends_with_two_and_torchrun_names_it(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "true", "--folder", str(tmp_path / "none"))
    assert done.returncode == 1 and "\nverdict    2: faults" in done.stdout
    assert "fault: all ranks: " in done.stdout and "a run could not save there" in done.stdout
    assert "traceback : verdict    2: faults" in done.stderr and "port of a run" not in done.stdout


def ranks_of_mpi(words: list[str], core: int, niceness: list[int]) -> tuple[list[int], list[str]]:
    """Runs a rank for each niceness, as mpirun starts them, all on one core. Returns exit codes and outputs."""
    processes, port = [], str(free_port())
    for rank, nice in enumerate(niceness):
        environment = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank), "MASTER_PORT": port}
        environment |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}

        def before(nice: int = nice) -> None:
            os.sched_setaffinity(0, {core})
            os.nice(nice)

        processes.append(
            subprocess.Popen(
                [sys.executable, DOCTOR, *words],
                env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=before,
            )
        )
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    return [process.returncode for process in processes], outputs


@pytest.mark.slow
def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    """Both ranks share a core, and the system gives rank 1 a third of what it gives rank 0."""
    core = max(os.sched_getaffinity(0))
    codes, outputs = ranks_of_mpi(["--measure", "--folder", str(tmp_path)], core, [0, 5])
    assert codes == [0, 0] and outputs[1] == "" and "measured   links within a host" in outputs[0]
    slow = [line for line in outputs[0].splitlines() if "is slow: products" in line]
    assert len(slow) == 1 and slow[0].startswith("warning: rank 1 ("), outputs[0]


def test_nothing_is_wrong_with_one_process(tmp_path: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [python(), DOCTOR, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=100,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
    )  # fmt: skip
    assert done.returncode in (0, 1) and "\nverdict    " in done.stdout, done.stderr
    assert "were compared" not in done.stdout and time.monotonic() - began < 60
