"""Starts programs of several ranks like torchrun, for tests that send signals and read exit codes."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from support.forkserver import forkserver, start_server
from support.ports import free_port
from support.runs import GPT, TINY

from megatron.training import pretrain


@dataclass
class Program:
    """The ranks of a running program."""

    processes: list[ForkServerProcess]
    outputs: list[Path]

    def output(self, rank: int) -> str:
        """Returns what a rank has printed so far to stdout and stderr."""
        return self.outputs[rank].read_text() if self.outputs[rank].exists() else ""

    def wait_for(self, rank: int, text: str, seconds: float = 240.0) -> None:
        """Waits until a rank has printed a text. Raises AssertionError if it ends before, or after `seconds`."""
        end = time.monotonic() + seconds
        while text not in self.output(rank):
            assert time.monotonic() < end, f"rank {rank} did not print {text!r}:\n{self.output(rank)}"
            assert self.processes[rank].is_alive(), f"rank {rank} ended:\n{self.output(rank)}"
            time.sleep(0.02)

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to one rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def exit_codes(self, seconds: float = 240.0) -> list[int | None]:
        """Waits for all ranks and returns their exit codes: None for a rank that is killed after `seconds`."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes


def launch(
    flags: str, world_size: int, folder: Path, main: Callable[[], None] | None = None, *, base: str = TINY
) -> Program:
    """Starts the ranks of `main` (default: pretrain_gpt.py) with these flags. With `world_size` 0 there is one process
    without the variables of torchrun."""
    port = free_port()
    folder.mkdir(exist_ok=True)
    ranks = range(max(world_size, 1))
    outputs = [folder / f"rank_{rank}.txt" for rank in ranks]
    words = f"{base} {flags}".split()
    processes = [
        forkserver.Process(target=_main, args=(rank, world_size, port, words, outputs[rank], main)) for rank in ranks
    ]
    start_server()
    for process in processes:
        process.start()
    return Program(processes, outputs)


def _main(
    rank: int, world_size: int, port: int, words: list[str], output: Path, main: Callable[[], None] | None
) -> None:
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if world_size:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["pretrain_gpt.py", *words]
    multiprocessing.set_start_method(None, force=True)  # the system's default, not that of this process
    (main or _pretrain_gpt)()


def _pretrain_gpt() -> None:
    pretrain(GPT)
