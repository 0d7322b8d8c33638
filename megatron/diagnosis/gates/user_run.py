"""Runs a user's command for a gate: some steps, with a folder of its own for checkpoints, metrics and output."""

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core.exceptions import UserError
from megatron.training.config.command_line import kept_words, read_command_line, split_words
from megatron.training.config.flag_table import Flag
from megatron.training.launch.launcher_variables import processes_of
from megatron.training.log.jsonl import MetricsHistory, read_metrics

_ROOT = Path(__file__).resolve().parents[3]
"""Folder of the package, for a run in another folder."""
_DROPPED_GROUPS = {"logging", "evaluation", "tensors of single steps"}
_KEPT_OF_CHECKPOINTS = {"ckpt_format", "pretrained_checkpoint", "load_hf", "async_save", "async_strategy"}
_DROPPED = {"exit_interval", "exit_duration_in_mins", "dry_run", "print_config"}
_FAULTS_ON_PURPOSE = ("fault_injector_", "error_injection_")
_SIZES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")


@dataclass(frozen=True)
class UserRun:
    """A run as its user starts it."""

    script: Path
    flags: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    """Words before the script, such as torchrun's; without them a gate starts the processes."""
    processes: int = 1
    """Processes that a gate starts, or that the launcher starts."""

    def values(self) -> dict[str, Any]:
        """Returns the values of the known flags by field name. The run itself reports mistakes in them."""
        return read_command_line(self.flags, ignore_unknown_args=True).values

    def with_layout(self, flags: Sequence[str]) -> "UserRun":
        """Returns the run in another layout: flags that come after its own, and as many processes as it needs."""
        other = replace(self, flags=(*self.flags, *flags), launcher=())
        least = ranks_needed(other.values())
        return replace(other, processes=max(least, math.ceil(self.processes / least) * least))


def read_user_run(words: Sequence[str], default_script: Path, processes: int | None = None) -> UserRun:
    """Reads the words after `--`: [LAUNCHER ...] [SCRIPT] FLAGS. Without a script it is `default_script`.

    Raises UserError without words, for a script that does not exist, and if this process is itself a rank of a run.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("WORLD_SIZE is above 1; start the gate once, without torchrun: it starts the ranks of the run")
    place = next((number for number, word in enumerate(words) if word.endswith(".py")), None)
    if words and words[0].startswith("--"):
        place, words = 0, [str(default_script), *words]
    if place is None:
        raise UserError("no run to judge; give --run FOLDER, or the run's command after --: -- pretrain_gpt.py FLAGS")
    launcher, script, flags = tuple(words[:place]), Path(words[place]), tuple(words[place + 1 :])
    if not script.is_file():
        raise UserError(f"{script}: no such script; give its path after --")
    run = UserRun(script.resolve(), flags)
    if launcher and processes is not None:
        raise UserError("--nproc-per-node goes before -- or into the launcher's words after it, not both")
    count = processes_of(launcher) if launcher else processes
    least = ranks_needed(run.values())
    if count is None:
        count = least
    if count % least:
        raise UserError(f"the layout of the flags needs a multiple of {least} ranks, and {count} are started")
    return replace(run, launcher=launcher, processes=count)


def ranks_needed(values: Mapping[str, object]) -> int:
    """Returns the smallest number of ranks of a layout, given values of flags by field name."""
    tensor, context, pipeline = (_whole(values.get(name)) for name in _SIZES)
    expert_tensor = _whole(values.get("expert_tensor_parallel_size") or tensor)
    experts = _whole(values.get("expert_model_parallel_size")) * expert_tensor
    return math.lcm(tensor * context, experts if values.get("num_moe_experts") else 1) * pipeline


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def kept_flags(flags: Sequence[str], also: Sequence[str] = ()) -> list[str]:
    """Returns the flags without those of checkpoints, logs, evaluation, the end of the run and faults on purpose, so
    that a gate leaves the folders of the user's run alone. Fields of `also` are dropped too."""
    return kept_words(split_words(flags)[0], lambda flag: flag is None or not (_is_dropped(flag) or flag.field in also))


def _is_dropped(flag: Flag) -> bool:
    if flag.group == "checkpoints":
        return flag.field not in _KEPT_OF_CHECKPOINTS
    return flag.group in _DROPPED_GROUPS or flag.field in _DROPPED or flag.field.startswith(_FAULTS_ON_PURPOSE)


@dataclass(frozen=True)
class FinishedPart:
    """A part of a run that a gate has started."""

    folder: Path
    exit_code: int
    processes: int
    output: str
    """The end of what it printed."""

    @property
    def failure(self) -> str:
        """Its last line about an error, for a sentence."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        about = [line for line in lines if "error" in line.lower() or "the run ends" in line]
        return (about or lines or ["it printed nothing"])[-1][:300]

    def metrics(self) -> MetricsHistory:
        """Returns its metrics. Raises UserError if it wrote none."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            raise UserError(f"the run wrote no metrics (exit code {self.exit_code}): {self.failure}")
        return read_metrics(path)


def run_part(
    run: UserRun,
    folder: Path,
    steps: int,
    flags: Sequence[str] = (),
    *,
    before_script: Sequence[str] = (),
    log_interval: int = 1,
) -> FinishedPart:
    """Runs a command until the iteration `steps`, with its metrics and output in `folder`. `flags` come last.
    `before_script` are a program and its arguments that run the script.

    Raises UserError with the run's own sentence if it refuses its flags or data.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = [*kept_flags(run.flags), *_folders(run, folder), "--log-interval", str(log_interval), "--eval-iters", "0"]
    words += ["--exit-interval", str(steps), *flags]
    command = [*_launcher(run), *before_script, str(run.script), *words]
    print(f"running {steps} steps in {run.processes} processes; output: {folder / 'output.txt'}", file=sys.stderr)
    paths = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "WANDB_MODE": "disabled", "PYTHONPATH": paths}
    with (folder / "output.txt").open("wb") as output:
        try:
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode
        except OSError as error:
            raise UserError(f"{command[0]} cannot be started: {error.strerror}") from None
    text = (folder / "output.txt").read_text(errors="replace")[-20000:]
    refused = [line for line in text.splitlines() if line.startswith("error")]
    if code and refused:
        raise UserError(f"the run refuses to start: {refused[0].partition(': ')[2]}")
    return FinishedPart(folder, code, run.processes, text)


def _launcher(run: UserRun) -> list[str]:
    if run.launcher:
        return list(run.launcher)
    if run.processes == 1:
        return [sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(run.processes)]


def _folders(run: UserRun, folder: Path) -> list[str]:
    """Returns flags that keep the run out of the user's folders, also where a config file names them."""
    words = ["--metrics-path", str(folder / "metrics.jsonl")]
    values = replace(run, flags=tuple(kept_flags(run.flags))).values()
    for field, flag in (("save", "--save"), ("load", "--load"), ("tensorboard_dir", "--tensorboard-dir")):
        if values.get(field) is not None:
            words += [flag, str(folder / field)]
    return words
