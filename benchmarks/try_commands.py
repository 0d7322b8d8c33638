"""Tries training commands:   python benchmarks/try_commands.py COMMANDS.jsonl

Each line of the file is a JSON object with `entry` (pretrain_gpt.py, pretrain_hybrid.py, pretrain_bert.py or
pretrain_t5.py), `argv` (a list of words, or `command`, one string) and perhaps `source`. For each command:

1. `--dry-run`, with made-up data and a tokenizer that needs no files. --check flags only reads the flags, which takes
   milliseconds; a dry run of a large layout takes minutes.
2. If that passes, the command is reduced: flags appended to it set the sizes of model, batch and layout, made-up data,
   and paths in a temporary folder. Flags that do not fit the smaller layout are left out and listed.
3. It trains for two steps on the CPU, on 1 to --processes ranks.

Prints a table of outcomes with the reasons. Commands that are equal after the reduction run only once. Exit code 1 if a
command that passes the check does not train.
"""

import argparse
import contextlib
import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

import numba  # noqa: F401  # a run imports it and the next but one at their first use; here all forks share them
import torch

import pretrain_bert
import pretrain_hybrid  # imports pretrain_gpt too, so that forks find both imported
import pretrain_t5
from benchmarks.small_commands import data_words, small_command
from megatron.core.exceptions import UserError
from megatron.core.utils.torch_private import import_compiler
from megatron.training.arguments import configure
from megatron.training.config.command_line import split_words
from megatron.training.config.settings import LaunchEnvironment

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "pretrain_gpt.py": {"model_family": "gpt"},
    "pretrain_hybrid.py": pretrain_hybrid.DEFAULTS,
    "pretrain_bert.py": pretrain_bert.DEFAULTS,
    "pretrain_t5.py": pretrain_t5.DEFAULTS,
}
_KILLED = 124
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(95)))
"""Vocabulary of BERT and T5."""


@dataclass
class Outcome:
    """The outcome of a command."""

    name: str
    kind: str = "passes"
    """refused, trains or fails; passes: it is still to run."""
    reasons: list[str] = field(default_factory=list)
    entry: str = ""
    ranks: int = 0
    words: list[str] = field(default_factory=list)
    """The small command line."""


def _commands_of(file: Path) -> list[dict[str, Any]]:
    """Returns the commands of a file with one JSON object per line. Raises UserError for an unreadable file or an
    invalid line."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    commands = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                command = json.loads(line)
            except ValueError as error:
                raise UserError(f"{file}, line {number}: not JSON: {error}") from None
            if not isinstance(command, dict) or not {"argv", "command"} & command.keys():
                raise UserError(f'{file}, line {number}: not an object with "argv" or "command"')
            if command.get("entry") not in DEFAULTS:
                raise UserError(f'{file}, line {number}: "entry" is none of {", ".join(DEFAULTS)}')
            commands.append(command)
    return commands


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    options = _read(argv)
    try:
        commands = _commands_of(Path(options.file))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    import_compiler()
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.utils.tensorboard")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.txt").write_text("\n".join(WORDS))
        outcomes = [_prepare(command, number, options, folder) for number, command in enumerate(commands, 1)]
        checks = [command if options.check == "dry-run" else None for command in commands]
        pairs = [pair for pair in zip(outcomes, checks, strict=True) if pair[0].kind == "passes"]
        first = {_key(*pair): pair for pair in reversed(pairs)}
        _run_all(list(first.values()), options, folder)
        for outcome, check in pairs:
            same, _ = first[_key(outcome, check)]
            outcome.kind, outcome.reasons = same.kind, same.reasons
    print(*table(outcomes), sep="\n")
    if options.output:
        Path(options.output).write_text("".join(json.dumps(vars(outcome)) + "\n" for outcome in outcomes))
    return int(any(outcome.kind == "fails" for outcome in outcomes))


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    summary, *_ = (__doc__ or "").split(":")
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("file", help="commands, one JSON object per line")
    parser.add_argument("--check", choices=["dry-run", "flags"], default="dry-run", help="how a command is checked")
    parser.add_argument("--processes", type=int, choices=[1, 2, 4], default=4, help="most ranks of a small run")
    parser.add_argument("--jobs", type=int, default=1, help="commands that run at the same time")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of a check and of a run")
    parser.add_argument("--output", help="file to write the outcomes to, one JSON object per line")
    return parser.parse_args(argv)


def _key(outcome: Outcome, check: Mapping[str, Any] | None) -> str:
    """Returns a text that is equal for equivalent commands: the last of repeated flags counts."""
    last = {occurrence.spelling: occurrence.words for occurrence in split_words(outcome.words)[0]}
    return json.dumps([outcome.entry, outcome.ranks, sorted(last.items()), check and words_of(check)])


def _prepare(command: Mapping[str, Any], number: int, options: argparse.Namespace, folder: str) -> Outcome:
    """Reads the flags of a command and makes it small."""
    entry, argv = command["entry"], words_of(command)
    outcome = Outcome(f"{number} {command.get('source', '')}", entry=entry)
    tail = data_words(entry, folder)
    try:
        launch = LaunchEnvironment(1, torch.cuda.is_available(), False, looks_at_files=True)
        config = configure([*argv, *tail, "--dry-run"], None, DEFAULTS[entry], launch_environment=launch)
        words, outcome.ranks = small_command(config, argv, options.processes)
    except UserError as error:
        outcome.kind, outcome.reasons = "refused", str(error).splitlines()
        print(f"refused {outcome.name}: {'; '.join(outcome.reasons)}", flush=True)
        return outcome
    outcome.words = [*words, *tail]
    return outcome


def _run_all(
    work: Sequence[tuple[Outcome, Mapping[str, Any] | None]], options: argparse.Namespace, folder: str
) -> None:
    """Runs small commands in --jobs forks of this process, and fills in their outcomes. If an outcome comes with a
    command, that command gets a dry run first."""
    sys.stdout.flush()
    pids = []
    for job in range(options.jobs):
        pid = os.fork()
        if not pid:
            for number in range(job, len(work), options.jobs):
                _run_one(*work[number], options, folder)
                Path(folder, f"outcome_{number}").write_text(
                    json.dumps([work[number][0].kind, work[number][0].reasons])
                )
            sys.stdout.flush()
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    for number, (outcome, _) in enumerate(work):
        file = Path(folder, f"outcome_{number}")
        ended: list[Any] = ["fails", ["the process that ran it ended early"]]
        found = json.loads(file.read_text()) if file.exists() else ended
        outcome.kind, outcome.reasons = found


def _run_one(outcome: Outcome, check: Mapping[str, Any] | None, options: argparse.Namespace, folder: str) -> None:
    code, text = 0, ""
    if check is not None:
        whole = [*words_of(check), *data_words(outcome.entry, folder), "--dry-run"]
        code, text = run_program(outcome.entry, whole, 0, folder, options.seconds)
    if code:
        outcome.kind, outcome.reasons = ("refused" if code == 2 else "fails"), _errors(text)
    else:
        code, text = run_program(outcome.entry, outcome.words, outcome.ranks, folder, options.seconds)
        outcome.kind, outcome.reasons = ("fails", _errors(text)) if code else ("trains", [])
    if code == _KILLED:
        outcome.reasons = [f"the {options.seconds:g} seconds of --seconds are over"]
    print(f"{outcome.kind:8}{outcome.name}  {'; '.join(outcome.reasons)}", flush=True)


def words_of(command: Mapping[str, Any]) -> list[str]:
    """Returns the words of a command of the file."""
    if "argv" in command:
        return list(command["argv"])
    return shlex.split(command["command"])


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def run_program(entry: str, words: Sequence[str], ranks: int, folder: str, seconds: float) -> tuple[int, str]:
    """Runs an entry script in forks of this process. Returns the exit code and the output of a failed rank, or 0 and an
    output. 0 ranks: one process without the variables of torchrun. Exit code 124: time limit exceeded."""
    with tempfile.TemporaryDirectory(dir=folder) as here:
        port = _free_port()
        outputs = [Path(here, f"rank_{rank}") for rank in range(max(ranks, 1))]
        pids = [_fork(entry, words, rank, ranks, port, here, output) for rank, output in enumerate(outputs)]
        codes = _wait(pids, seconds)
        failed = min(range(len(codes)), key=lambda rank: (codes[rank] == 0, codes[rank] == _KILLED))
        return codes[failed], outputs[failed].read_text(errors="replace")


def _fork(entry: str, words: Sequence[str], rank: int, ranks: int, port: int, here: str, output: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
        os.chdir(here)
        sys.argv = [entry, *words]
        runpy.run_path(str(ROOT / entry), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: Sequence[int], seconds: float) -> list[int]:
    """Returns the exit codes. Kills the processes that still run when the time is over, or ten seconds after another
    has failed; their code is 124."""
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(pids) and time.monotonic() < end:
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                end = min(end, time.monotonic() + 10.0) if codes[pid] else end
        time.sleep(0.02)
    for pid in set(pids) - codes.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[pid] = _KILLED
    return [codes[pid] for pid in pids]


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _errors(text: str) -> list[str]:
    """Returns the lines with errors, or the last line of a traceback."""
    lines = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")]
    return lines or [line for line in text.splitlines() if line.strip()][-1:] or ["no output"]


# ---------------------------------------------------------------------------------------------------------------------
# The table


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yields the lines of the table: the number of commands of each outcome, then of each reason."""
    counts = Counter(outcome.kind for outcome in outcomes)
    passed = len(outcomes) - counts["refused"]
    yield ""
    yield f"{len(outcomes)} commands: {passed} pass the check, {counts['refused']} are refused"
    share = f" ({counts['trains'] / passed:.1%})" if passed else ""
    yield f"of those that pass, {counts['trains']} train{share}, {counts['fails']} fail"
    for kind in ("refused", "fails"):
        reasons = Counter(reason for outcome in outcomes if outcome.kind == kind for reason in set(outcome.reasons))
        for reason, count in reasons.most_common():
            yield f"  {kind:8}{count:4}  {reason}"


if __name__ == "__main__":
    run_main(main)
