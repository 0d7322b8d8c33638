"""examples/train.slurm with a SLURM made of shell scripts: ranks, signals, and the return into the queue."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SRUN = """#!/bin/bash
shift # --kill-on-bad-exit
each=$SLURM_NTASKS_PER_NODE all=$((SLURM_NTASKS_PER_NODE * SLURM_JOB_NUM_NODES))
for ((rank = 0; rank < all; rank++)); do
    SLURM_PROCID=$rank SLURM_NODEID=$((rank / each)) SLURM_LOCALID=$((rank % each)) SLURM_NTASKS=$all "$@" &
done
code=0
for job in $(jobs -p); do wait $job || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo first-host; echo second-host; else echo "$@" >> "$NOTES/scontrol"; fi
"""
SCANCEL = """#!/bin/bash
echo "$@" >> "$NOTES/scancel"
for file in "$NOTES"/pid-*; do kill -USR2 "$(cat "$file")"; done
"""
PYTHON = """#!/bin/bash
echo "rank $RANK of $WORLD_SIZE, local $LOCAL_RANK, $MASTER_ADDR:$MASTER_PORT, $(basename "$1")" > "$NOTES/rank-$RANK"
trap 'echo saved >> "$NOTES/rank-$RANK"; exit 0' USR2
if [ "$CODE" = wait ]; then echo $$ > "$NOTES/pid-$RANK"; while true; do sleep 0.02; done; fi
exit "$CODE"
"""


@pytest.fixture
def job(tmp_path: Path) -> "subprocess.Popen[str]":
    """Starts the script with an example whose `python` does what the variable CODE says."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL), ("python", PYTHON)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)

    def start(code: str, nodes: int = 1) -> "subprocess.Popen[str]":
        variables = {
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "NOTES": str(tmp_path), "CODE": code, "SIZE": "tiny",
            "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "hosts", "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_JOB_NUM_NODES": str(nodes),
        }  # fmt: skip
        command = [ROOT / "examples/train.slurm", ROOT / "examples/llama/train_llama.sh", tmp_path / "checkpoints"]
        return subprocess.Popen(command, env={**os.environ, **variables}, cwd=tmp_path, text=True)

    return start  # type: ignore[return-value]


def wait_for(*files: Path) -> None:
    end = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end, files
        time.sleep(0.02)


def test_near_the_end_of_its_time_the_job_saves_and_queues_again(job, tmp_path: Path) -> None:
    running = job("wait")
    wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    running.send_signal(signal.SIGUSR1)
    assert running.wait(60) == 0
    assert (tmp_path / "scancel").read_text() == "--signal=USR2 77\n"
    assert (tmp_path / "scontrol").read_text() == "requeue 77\n"
    for rank in range(2):
        place = f"rank {rank} of 2, local {rank}, first-host:20077, pretrain_gpt.py"
        assert (tmp_path / f"rank-{rank}").read_text() == f"{place}\nsaved\n"


def test_ranks_of_two_nodes(job, tmp_path: Path) -> None:
    assert job("0", nodes=2).wait(60) == 0
    for rank in range(4):
        place = f"rank {rank} of 4, local {rank % 2}, first-host:20077, pretrain_gpt.py"
        assert (tmp_path / f"rank-{rank}").read_text() == f"{place}\n"


@pytest.mark.parametrize("script", sorted(ROOT.glob("examples/**/*.s[hl]*")), ids=lambda path: path.name)
def test_bash_can_read_the_script(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_that_ends_by_itself_stays_out_of_the_queue(job, code: int, tmp_path: Path) -> None:
    assert job(str(code)).wait(60) == code
    assert not (tmp_path / "scontrol").exists()


def test_a_preemption_is_left_to_slurm(job, tmp_path: Path) -> None:
    """SLURM sends SIGTERM to the script and to the ranks, and puts the job back into the queue itself."""
    running = job("wait")
    wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    running.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert running.poll() is None
    for rank in range(2):
        os.kill(int((tmp_path / f"pid-{rank}").read_text()), signal.SIGUSR2)
    assert running.wait(60) == 0 and not (tmp_path / "scontrol").exists()


def test_outside_of_slurm_a_line_says_how_to_submit() -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    script = ROOT / "examples/train.slurm"
    done = subprocess.run(["bash", script], env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "submit this file, sbatch examples/train.slurm EXAMPLE" in done.stderr
    assert "unbound" not in done.stderr
