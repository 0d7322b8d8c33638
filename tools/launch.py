"""Starts a run, and starts it again from its newest whole checkpoint when it fails.

python tools/launch.py torchrun --nproc-per-node 8 pretrain_gpt.py --save checkpoints --save-interval 500 ...

The command needs --save. Once that folder has a complete checkpoint, the tool starts the command with `--load` of the
folder, and without the flags of a first start (--finetune, --ckpt-step, --no-load-optim, --no-load-rng, another
--load). The tool gives up after three fast failures in a row (--fast-failures). A failure is fast if it comes within
five minutes (--fast-seconds) and leaves no new checkpoint. A checkpoint to which the run went back after a loss spike
is not new. A mistake in the command line (exit code 2) is not tried again. Before a restart, the tool ends all
processes that the command has left.

The tool passes a signal (SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2) to one rank, and all ranks save a checkpoint and
end. The tool then exits with 128 + the signal's number. Otherwise it exits with the command's exit code.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint
from megatron.core.dist_checkpointing.manifest import MANIFEST
from megatron.core.exceptions import UserError
from megatron.launcher import LAUNCH_TOOL, start_time

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FIRST_START_ONLY = {"--finetune": 0, "--no-load-optim": 0, "--no-load-rng": 0, "--ckpt-step": 1, "--load": 1}
"""Flags that a restart leaves out, with the number of their values."""
LEFT_SECONDS = 5.0
"""Seconds that processes of a run that has failed have to end by themselves, as ranks do without their launcher."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    args = _parser().parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        if not command:
            raise UserError(
                "no command; give the command of the run: launch.py torchrun pretrain_gpt.py --save FOLDER ..."
            )
        save = folder_to_save(command)
        launcher = Launcher(command, save, args.fast_failures, args.fast_seconds, args.wait_seconds)
        return launcher.run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


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
    parser.add_argument("--wait-seconds", type=float, default=5.0, help="Pause before a restart.")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="The command of the run.")
    return parser


def folder_to_save(command: Sequence[str]) -> Path:
    """Returns the folder of the command's --save. Raises UserError without one."""
    found = None
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == "--save":
            found = following
        elif word.startswith("--save="):
            found = word.removeprefix("--save=")
    if not found:
        raise UserError("the command has no --save DIR; without checkpoints a restart begins at iteration 0")
    return Path(found)


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


def newest_checkpoint(save: Path) -> Newest | None:
    """Returns the newest whole checkpoint in a folder, None if there is none."""
    try:
        found = find_checkpoint(save, log=lambda text: None)
        return None if found is None else Newest(found.manifest.iteration, (found.folder / MANIFEST).stat().st_mtime_ns)
    except (UserError, OSError):  # only broken ones, or deleted meanwhile
        return None


class Launcher:
    """A run that is started again when it fails.

    Args:
        command: the command of a first start.
        save: folder of its checkpoints.
        fast_failures: number of fast failures in a row after which it gives up.
        fast_seconds: a failure is fast if it comes sooner, without a newer checkpoint.
        wait_seconds: pause before a restart.
        say: prints a line.
    """

    def __init__(
        self,
        command: Sequence[str],
        save: Path,
        fast_failures: int = 3,
        fast_seconds: float = 300.0,
        wait_seconds: float = 5.0,
        say: Callable[[str], object] = lambda text: print(f"launch: {text}", file=sys.stderr, flush=True),
    ) -> None:
        self.command, self.save, self.say = command, save, say
        self.fast_failures, self.fast_seconds, self.wait_seconds = fast_failures, fast_seconds, wait_seconds
        self.received: int | None = None
        self._mark = f"{os.getpid()}-{start_time(os.getpid())}"
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Runs the command until it succeeds, the tool gives up or a signal comes. Returns the exit code."""
        previous = {number: signal.signal(number, self._pass_on) for number in SIGNALS}
        try:
            return self._run()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        fast = 0
        while True:
            before, started = newest_checkpoint(self.save), time.monotonic()
            if self.received is not None:  # while no process was there to pass it to
                return 128 + self.received
            code = self._start(self.command if before is None else resuming(self.command, self.save))
            after, seconds = newest_checkpoint(self.save), time.monotonic() - started
            if self.received is not None:
                self.say(
                    f"{signal.Signals(self.received).name} ended the run; its newest checkpoint is {_named(after)}"
                )
                return 128 + self.received
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
            end = time.monotonic() + self.wait_seconds
            while time.monotonic() < end and self.received is None:
                time.sleep(min(0.1, self.wait_seconds))
            if self.received is not None:
                return 128 + self.received

    def _start(self, command: Sequence[str]) -> int:
        self.say(f"starting {shlex.join(command)}")
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
        while left := processes_with(f"{LAUNCH_TOOL}={self._mark}"):
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
        process = self._process
        if process is not None and process.returncode is None:
            for pid in one_rank(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


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
