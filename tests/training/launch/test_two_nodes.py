"""A run of two nodes, each with a torchrun: when one of them dies, all processes of both end soon, one message names
the ranks, and the run goes on from its newest checkpoint."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch import launch
from support.nodes import Nodes
from support.ports import free_port
from support.runs import TINY

from megatron.training.log.jsonl import read_metrics
from tools.launch import newest_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

SCRIPT = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import pretrain_gpt
from megatron.training import pretrain
from megatron.training.hooks.hook import Hook
from megatron.training.providers import Providers

class Slow(Hook):
    def after_step(self, iteration):
        if Path(sys.argv[0]).with_name("slow").exists():
            time.sleep(0.3)

parts = pretrain_gpt.build_model, pretrain_gpt.build_datasets, pretrain_gpt.build_forward_step
pretrain(Providers(*parts, build_hooks=lambda context: [Slow()]))
"""

FLAGS = (
    f"{TINY} --train-iters 30 --eval-iters 0 --save-interval 5 --log-interval 1 "
    "--tensor-model-parallel-size 2 --use-distributed-optimizer"
)


class Run:
    """Two nodes of two ranks each; the steps take a third of a second."""

    def __init__(self, nodes: Nodes, folder: Path, corpus: str) -> None:
        self.nodes, self.folder = nodes, folder
        self.flags = f"{FLAGS} --data-path {corpus}"
        self.save = folder / "saved"
        self.logs = [folder / f"node{node}.txt" for node in range(2)]
        self.processes: list[subprocess.Popen[bytes] | None] = [None, None]
        self.port = free_port()
        (folder / "run.py").write_text(SCRIPT)
        (folder / "slow").touch()

    def start(self, node: int, *launcher: str) -> None:
        """Starts torchrun on a node, or a launcher that starts it."""
        words = [sys.executable, *launcher, *([sys.executable] if launcher else []), "-m", "torch.distributed.run"]
        words += ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node)]
        words += ["--master-addr", self.nodes.addresses[0], "--master-port", str(self.port)]
        words += [str(self.folder / "run.py"), *self.flags.split(), "--save", str(self.save)]
        self.processes[node] = self.nodes.start(node, words, self.logs[node], ROOT)

    def log(self, node: int) -> str:
        return self.logs[node].read_text()

    def wait_for_checkpoint(self, iteration: int) -> None:
        tracker = self.save / "latest_checkpointed_iteration.txt"
        wait_until(lambda: tracker.exists() and int(tracker.read_text()) >= iteration, 240, self)


def wait_until(condition, seconds: float, run: Run) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "".join(f"--- node {node}\n{run.log(node)}" for node in range(2))
        time.sleep(0.05)


@pytest.fixture
def run(tmp_path: Path, corpus: str) -> Iterator[Run]:
    with Nodes() as nodes:
        print(nodes.kind)
        yield Run(nodes, tmp_path, corpus)


def lines_of_the_end(run: Run) -> list[str]:
    """Returns the messages about the end of the run, without those of torchrun's summaries."""
    lines = [line for node in range(2) for line in run.log(node).splitlines()]
    return [line for line in lines if line.startswith("the run ends:")]


def end(run: Run, fault: str) -> float:
    """Lets something fail, waits until all processes have ended, and returns the seconds that this took."""
    began = time.monotonic()
    if fault in ("rank 0", "rank 3"):
        [pid] = run.nodes.processes(int(fault == "rank 3"), f"RANK={fault[-1]}")
        os.kill(pid, signal.SIGKILL)
    elif fault == "cut":
        run.nodes.cut()
    else:
        run.nodes.kill(int(fault[-1]))
    wait_until(lambda: not any(run.nodes.processes(node) for node in range(2)), 90, run)
    return time.monotonic() - began


@pytest.mark.parametrize("fault", ["rank 0", "rank 3", "node 1", "node 0", "cut"])
def test_all_processes_of_both_nodes_end(run: Run, fault: str) -> None:
    for node in range(2):
        run.start(node)
    run.wait_for_checkpoint(5)
    seconds = end(run, fault)
    logs = "".join(f"--- node {node}\n{run.log(node)}" for node in range(2))
    assert seconds < 30.0, logs
    assert all(process is not None and process.wait(1) != 0 for process in run.processes)
    lines = lines_of_the_end(run)
    if fault == "cut" and run.nodes.separate:  # each side sees the other one fall silent
        here, there = (re.fullmatch(r"the run ends: rank (\d) of 4 gave no sign of life .*", line) for line in lines)
        assert here and there and here[1] in "23" and there[1] == "0", logs
        assert f"\n  rank {5 - int(here[1])} is gone, too\n" in logs
        return
    [line] = lines
    # The checkpoint that the test waits for has its name before the save has ended.
    first = {"rank 0": "rank 0", "rank 3": "rank 3", "node 0": "rank 0"}
    what = f"{first[fault]} of 4 ended in (training|saving)" if fault in first else " of 4 "
    assert re.search(what, line), logs
    if fault == "node 1":
        first = line.split()[4]
        assert first in "23" and f"\n  rank {5 - int(first)} is gone, too\n" in logs


def test_the_run_goes_on_from_its_newest_checkpoint(run: Run, tmp_path: Path) -> None:
    """A node dies with its launcher. The launcher of the other one starts the run again, which waits for the node; once
    that is back, the run ends with the weights of one that was not interrupted."""
    for node in range(2):
        run.start(node, "tools/launch.py", "--wait-seconds", "1")
    run.wait_for_checkpoint(10)
    run.nodes.kill(1)
    wait_until(lambda: "the run failed after" in run.log(0), 60, run)
    found = newest_checkpoint(run.save)
    assert found is not None and 10 <= found.iteration < 30
    newest = found.iteration
    (tmp_path / "slow").unlink()
    run.start(1, "tools/launch.py", "--wait-seconds", "1")
    assert [process.wait(400) for process in run.processes if process is not None] == [0, 0]
    assert f"loaded checkpoint {newest}" in run.log(0) or f"iteration {newest}" in run.log(0)
    program = launch(f"{run.flags.removeprefix(TINY)} --save {tmp_path / 'whole'}", 4, tmp_path / "ranks")
    assert program.exit_codes() == [0] * 4
    history, wanted = read_metrics(run.save / "metrics.jsonl"), read_metrics(tmp_path / "whole" / "metrics.jsonl")
    for key in ("lm loss", "grad norm"):
        pairs = zip(*history.series(key), *wanted.series(key), strict=True)
        assert [pair for pair in pairs if pair[:2] != pair[2:]][:3] == [], f"{key}, resumed from {newest}"
    files = sorted((tmp_path / "whole" / "iter_0000030").glob("*.safetensors"))
    assert files
    for file in files:
        assert file.read_bytes() == (run.save / "iter_0000030" / file.name).read_bytes(), file.name
