"""Starts a run, and starts it again from its newest whole checkpoint when it fails.

python tools/launch.py torchrun --nproc-per-node 8 pretrain_gpt.py --save checkpoints --save-interval 500 ...

The command needs --save. Once that folder has a complete checkpoint, the tool starts the command with `--load` of the
folder, and without the flags of a first start (--finetune, --ckpt-step, --no-load-optim, --no-load-rng, another
--load). The tool gives up after three fast failures in a row (--fast-failures). A failure is fast if it comes within
five minutes (--fast-seconds) and leaves no new checkpoint. A checkpoint to which the run went back after a loss spike
is not new. A mistake in the command line (exit code 2) is not tried again. Before a restart, the tool ends all
processes that the command has left.

With --nproc-per-node the tool starts the ranks of one host itself, without torchrun:

python tools/launch.py --nproc-per-node 8 pretrain_gpt.py --save checkpoints --save-interval 500 ...

A restart then takes some seconds less, because ranks begin as copies of a process that has imported everything.
Together with local copies of the state (--non-persistent-ckpt-type local) a run goes on seconds after a kill.

After each end of the command a line says the goodput: the share of the time since the start of the tool in which
iterations were computed that count, from the run's metrics.jsonl.

The tool passes a signal (SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2) to one rank, and all ranks save a checkpoint and
end. The tool then exits with 128 + the signal's number. Otherwise it exits with the command's exit code.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint
from megatron.core.dist_checkpointing.local_runs import run_id
from megatron.core.dist_checkpointing.manifest import MANIFEST, read_manifest
from megatron.core.exceptions import UserError
from megatron.core.utils.store_path import place
from megatron.launcher import LAUNCH_TOOL, start_time

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FIRST_START_ONLY = {"--finetune": 0, "--no-load-optim": 0, "--no-load-rng": 0, "--ckpt-step": 1, "--load": 1}
"""Flags that a restart leaves out, with the number of their values."""
LEFT_SECONDS = 5.0
"""Seconds that processes of a run that has failed have to end by themselves, as ranks do without their launcher."""


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    args = _parser().parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UserError("no command; give the command of the run: launch.py torchrun pretrain_gpt.py --save FOLDER ...")
    save = folder_to_save(command)
    if args.nproc_per_node is not None and (args.nproc_per_node < 1 or not command[0].endswith(".py")):
        raise UserError("--nproc-per-node starts N ranks of a script: launch.py --nproc-per-node 8 pretrain_gpt.py ...")
    return Launcher(
        command, save, args.fast_failures, args.fast_seconds, args.wait_seconds, ranks=args.nproc_per_node
    ).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="launch.py [flags] COMMAND ...", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fast-failures",
        type=int,
        default=3,
        metavar="N",
        help="Number of fast failures in a row after which the tool gives up.",
    )
    parser.add_argument(
        "--fast-seconds",
        type=float,
        default=300.0,
        help="A failure within this time and without a new checkpoint is fast.",
    )
    parser.add_argument("--wait-seconds", type=float, default=5.0, help="Pause before a restart after a fast failure.")
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="Ranks that the tool starts itself on this host; the command is then that of the script.",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="The command of the run.")
    return parser


def folder_to_save(command: Sequence[str]) -> Path:
    """Returns the folder of the command's --save. Raises UserError without one."""
    found = value_of(command, "--save")
    if not found:
        raise UserError("the command has no --save DIR; without checkpoints a restart begins at iteration 0")
    return place(found)


def value_of(command: Sequence[str], flag: str) -> str | None:
    """Returns the value of the last `flag` in a command; None without one."""
    found = None
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.removeprefix(f"{flag}=")
    return found


def resuming(command: Sequence[str], save: Path) -> list[str]:
    """Returns the command that continues from the newest checkpoint in `save`."""
    words, skip = [], 0
    for word in command:
        name = word.partition("=")[0]
        if skip:
            skip -= 1
        elif name in FIRST_START_ONLY:
            skip = 0 if "=" in word else FIRST_START_ONLY[name]
        else:
            words.append(word)
    return [*words, "--load", str(save)]


class Newest(NamedTuple):
    """The newest whole checkpoint in a folder."""

    iteration: int
    written: int
    """Time at which it was complete, in nanoseconds since the epoch."""


def newest_checkpoint(save: Path, local: Path | None = None) -> Newest | None:
    """Returns the newest whole checkpoint in a folder, or the newest local copy of a rank's state (in `local`, the
    value of --non-persistent-local-ckpt-dir) if that is newer; None if there is none."""
    found = list[Newest]()
    try:
        whole = find_checkpoint(save, log=lambda text: None)
        if whole is not None:
            found.append(Newest(whole.manifest.iteration, (whole.folder / MANIFEST).stat().st_mtime_ns))
    except (UserError, OSError):  # only broken ones, or deleted meanwhile
        pass
    copies = () if local is None else local.glob(f"{run_id(save)}/*/*/*/{MANIFEST}")
    for path in copies:
        with contextlib.suppress(UserError, OSError):
            found.append(Newest(read_manifest(path.parent).iteration, path.stat().st_mtime_ns))
    return max(found, default=None, key=lambda newest: newest.written)


def counted_seconds(metrics: Path, after: int) -> float | None:
    """Returns the seconds of the iterations after `after` in a metrics.jsonl; None without such a file."""
    try:
        lines = metrics.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    seconds = 0.0
    for line in lines:
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict) and values.get("iteration", 0) > after:
                seconds += values.get("ms per iteration", 0.0) / 1000.0
    return seconds


class Launcher:
    """A run that is started again when it fails.

    Args:
        command: the command of a first start.
        save: folder of its checkpoints.
        fast_failures: number of fast failures in a row after which it gives up.
        fast_seconds: a failure is fast if it comes sooner, without a newer checkpoint.
        wait_seconds: pause before a restart.
        say: prints a line.
        ranks: number of ranks of the script `command` that the tool starts itself; None: the command starts them.
    """

    def __init__(
        self,
        command: Sequence[str],
        save: Path,
        fast_failures: int = 3,
        fast_seconds: float = 300.0,
        wait_seconds: float = 5.0,
        say: Callable[[str], object] = lambda text: print(f"launch: {text}", file=sys.stderr, flush=True),
        ranks: int | None = None,
    ) -> None:
        self.command, self.save, self.say = command, save, say
        self.fast_failures, self.fast_seconds, self.wait_seconds = fast_failures, fast_seconds, wait_seconds
        self.received: int | None = None
        local = value_of(command, "--non-persistent-local-ckpt-dir")
        self.local = None if local is None else Path(local)
        self.metrics = Path(value_of(command, "--metrics-path") or save / "metrics.jsonl")
        """The metrics of the iterations that count: a resumed run moves the others aside."""
        self.nursery = None if ranks is None else Nursery(ranks)
        self._mark = f"{os.getpid()}-{start_time(os.getpid())}"
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Runs the command until it succeeds, the tool gives up or a signal comes. Returns the exit code."""
        previous = {number: signal.signal(number, self._pass_on) for number in SIGNALS}
        try:
            return self._run()
        finally:
            if self.nursery is not None:
                self.nursery.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        fast, began = 0, time.monotonic()
        first = newest_checkpoint(self.save, self.local)
        while True:
            before, started = newest_checkpoint(self.save, self.local), time.monotonic()
            if self.received is not None:  # while no process was there to pass it to
                return 128 + self.received
            code = self._start(self.command if before is None else resuming(self.command, self.save))
            after, seconds = newest_checkpoint(self.save, self.local), time.monotonic() - started
            if self.received is not None:
                self.say(
                    f"{signal.Signals(self.received).name} ended the run; its newest checkpoint is {_named(after)}"
                )
                return 128 + self.received
            counted = counted_seconds(self.metrics, 0 if first is None else first.iteration)
            if counted is not None:
                total = time.monotonic() - began
                self.say(f"goodput {counted / total:.1%}: in {counted:.0f} of {total:.0f} s the run made progress")
            if code == 0:
                return 0
            if code == 2:
                self.say("exit code 2: a mistake in the command, its data or its checkpoints; it is not tried again")
                return code
            saved = after is not None and (before is None or after.written > before.written)
            fast = fast + 1 if not saved and seconds < self.fast_seconds else 0
            self.say(
                f"the run failed after {seconds:.0f} s (exit code {code}); its newest checkpoint is {_named(after)}"
            )
            self._end_processes()
            if fast >= self.fast_failures:
                self.say(
                    f"{fast} failures in a row in less than {self.fast_seconds:g} s, without a checkpoint: giving up"
                )
                return code
            end = time.monotonic() + (self.wait_seconds if fast else 0.0)
            while time.monotonic() < end and self.received is None:
                time.sleep(min(0.1, self.wait_seconds))
            if self.received is not None:
                return 128 + self.received

    def _start(self, command: Sequence[str]) -> int:
        self.say(f"starting {shlex.join(command)}")
        if self.nursery is not None:
            return self.nursery.run(command, {**os.environ, LAUNCH_TOOL: self._mark}, lambda: self.received)
        try:
            self._process = subprocess.Popen(command, env={**os.environ, LAUNCH_TOOL: self._mark})
        except OSError as error:
            raise UserError(f"{command[0]} cannot be started: {error.strerror}") from None
        if self.received is not None:  # since the last look at it
            self._pass_on(self.received, None)
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def _end_processes(self) -> None:
        """Ends the processes that the command has left: the ranks of a torchrun that was killed would go on, and write
        into the folder of the next start."""
        began, told = time.monotonic(), False
        kept = None if self.nursery is None else self.nursery.pid
        while left := [pid for pid in processes_with(f"{LAUNCH_TOOL}={self._mark}") if pid != kept]:
            seconds, names = time.monotonic() - began, ", ".join(map(str, left))
            if seconds > LEFT_SECONDS:
                if not told:
                    self.say(f"processes of the run that are still there are killed: {names}")
                told = True
                for pid in left:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            if seconds > LEFT_SECONDS + 30:
                self.say(f"processes {names} do not end: a disk or a device does not answer them")
                return
            time.sleep(0.1)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if self.nursery is not None:
            self.nursery.signal(number)
        process = self._process
        if process is not None and process.returncode is None:
            for pid in one_rank(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


class Nursery:
    """The process that starts ranks by copying itself (`megatron.training.launch.nursery`)."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._pids: list[int] = []

    @property
    def pid(self) -> int | None:
        """Its process id, while it is there."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def run(self, command: Sequence[str], environment: dict[str, str], received: Callable[[], int | None]) -> int:
        """Starts the ranks of a script, waits for their end and returns their exit code. `received` returns a signal
        that came before there were ranks."""
        if self.pid is None or self._channel is None:
            self._start(environment)
        assert self._channel is not None
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        request = {"script": command[0], "arguments": command[1:], "ranks": self.ranks, "port": port}
        try:
            self._channel.sendall(json.dumps(request).encode() + b"\n")
            with self._channel.makefile("r", encoding="utf-8") as lines:
                self._pids = json.loads(lines.readline() or '{"pids": []}')["pids"]
                number = received()
                if number is not None:
                    self.signal(number)
                code: int = json.loads(lines.readline() or '{"code": 1}')["code"]
        except OSError:  # it was killed
            code = 1
        self._pids = []
        return code

    def _start(self, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        module = [sys.executable, "-m", "megatron.training.launch.nursery", str(theirs.fileno())]
        path = os.pathsep.join(
            [str(Path(__file__).resolve().parents[1]), *filter(None, [environment.get("PYTHONPATH")])]
        )
        environment = {**environment, "PYTHONPATH": path}
        self._process = subprocess.Popen(module, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self._channel = ours

    def signal(self, number: int) -> None:
        """Passes a signal to one rank."""
        for pid in self._pids[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """Ends the process, and its ranks."""
        if self._channel is not None and self._process is not None:
            self._channel.close()
            self._process.wait()


def processes_with(variable: str) -> list[int]:
    """Returns the living processes that were started with this environment variable, other than this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "environ").read_bytes().split(b"\0")
            pid = int(folder.name)
            if variable.encode() in words and pid != os.getpid() and start_time(pid) is not None:
                found.append(pid)
    return sorted(found)


def one_rank(launcher: int) -> list[int]:
    """Returns the process of one rank of the run that `launcher` (torchrun) has started, or `launcher` itself if it has
    no ranks. A signal goes to a rank because all ranks of a run end together, whereas torchrun kills its ranks 30
    seconds after a signal to itself."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    generation = [launcher]
    while generation:
        for pid in sorted(generation):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if any(word.startswith(b"RANK=") for word in words):
                    return [pid]
        generation = [child for pid in generation for child in children.get(pid, ())]
    return [launcher]


def _named(newest: Newest | None) -> str:
    return "none" if newest is None else f"that of iteration {newest.iteration}"


if __name__ == "__main__":
    run_main(main)
