"""Runs, prints or compares the runs of a sweep: one script with each combination of some flags.

python tools/sweep.py rates.yaml                 prints the commands
python tools/sweep.py rates.yaml --run           runs them one after the other
python tools/sweep.py rates.yaml --slurm > array.sh && sbatch array.sh
python tools/sweep.py rates.yaml --results       compares their losses

The file, for example:

    save: runs/rates
    flags: --config model.yaml --train-iters 500 --mock-data
    vary:
      lr: [1e-3, 3e-3, 1e-2]
      width: {64: --hidden-size 64 --num-attention-heads 2, 128: --hidden-size 128 --num-attention-heads 4}

`vary` has a flag with its values, or a name with the words of each value. Further keys: `script` (pretrain_gpt.py when
not given) and `launch` (this Python), such as `torchrun --nproc_per_node 8`. A run saves into its folder under `save`
and continues from there, so a sweep that was stopped is started again with the same command. See docs/recipes.md.
"""

import argparse
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.core.exceptions import UserError
from megatron.core.utils.yaml_files import read_yaml
from megatron.training.log.plot_sweep import INDEX, last_loss

KEYS = ("save", "flags", "vary", "script", "launch")


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep's file."""

    save: Path
    flags: str
    vary: Mapping[str, Mapping[str, str]]
    """By flag or name: the words of the command line of each value, by the value's text."""
    script: str
    launch: str

    def runs(self) -> list["Run"]:
        """Returns the combinations; the last name varies fastest."""
        combinations = itertools.product(*(values.items() for values in self.vary.values()))
        return [
            Run(
                "_".join(f"{name}-{value}" for name, (value, _) in zip(self.vary, chosen, strict=True)),
                {name: value for name, (value, _) in zip(self.vary, chosen, strict=True)},
                " ".join(words for _, words in chosen),
            )
            for chosen in combinations
        ]

    def command(self, run: "Run") -> list[str]:
        """Returns the words of a run's command line."""
        folder = str(self.save / run.name)
        words = [*shlex.split(self.launch), self.script, *shlex.split(self.flags), *shlex.split(run.words)]
        return [*words, "--save", folder, "--load", folder]


@dataclass(frozen=True)
class Run:
    """One combination of a sweep."""

    name: str
    values: Mapping[str, str]
    words: str


def read_sweep(path: Path) -> Sweep:
    """Returns the sweep that a YAML or JSON file describes. Raises UserError, naming the file and the key."""
    content = read_yaml(path, as_text=True)
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no sweep; write the keys save, flags and vary")
    for key in content:
        if key not in KEYS:
            raise UserError(f"{path}: unknown key {key!r}; the keys are {', '.join(KEYS)}")
    for key in ("save", "vary"):
        if not content.get(key):
            raise UserError(f"{path}: {key} is missing")
    if not isinstance(content["vary"], dict):
        raise UserError(f"{path}: vary must map flags to lists of values")
    vary = {name: _values(name, found, path) for name, found in content["vary"].items()}
    texts = {"flags": "", "script": "pretrain_gpt.py", "launch": shlex.quote(sys.executable)} | content
    for key in set(KEYS) - {"vary"}:
        if not isinstance(texts[key], str):
            raise UserError(f"{path}: {key} must be a text")
    sweep = Sweep(Path(texts["save"]), texts["flags"], vary, texts["script"], texts["launch"])
    for words in (sweep.launch, sweep.flags, *(words for values in vary.values() for words in values.values())):
        _check_words(words, path)
    return sweep


def _check_words(words: str, path: Path) -> None:
    try:
        found = shlex.split(words)
    except ValueError as error:
        raise UserError(f"{path}: {words}: {str(error).lower()}") from error
    for flag in ("--save", "--load"):
        if flag in found:
            raise UserError(
                f"{path}: {flag} is set by the sweep, so that each run continues in its own folder; leave it out "
                "(--pretrained-checkpoint starts all runs from the same weights)"
            )


def _values(name: str, found: Any, path: Path) -> dict[str, str]:
    if name.startswith("-"):
        raise UserError(f"{path}: vary: {name}: write the flag without its dashes")
    for value in (name, *found) if isinstance(found, dict | list) else ():
        if "/" in value:  # the name of a run's folder has it
            raise UserError(f"{path}: vary: {name}: {value} has a /; name each value: {{NAME: --flag {value}}}")
    if isinstance(found, dict) and found and all(isinstance(words, str) for words in found.values()):
        return found
    if not isinstance(found, list) or not found or not all(isinstance(value, str) for value in found):
        raise UserError(f"{path}: vary: {name}: give a list of values, or the words of a command line by value")
    if len(set(found)) < len(found):
        raise UserError(f"{path}: vary: {name}: a value is there twice")
    return {value: f"--{name} {value}" for value in found}


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code: 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("file", type=Path, help="YAML or JSON file of the sweep")
    parser.add_argument("--index", type=int, metavar="N", help="only run number N, from 0")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--run", action="store_true", help="run the commands")
    action.add_argument("--slurm", action="store_true", help="print a script for sbatch: an array with a task per run")
    action.add_argument("--results", action="store_true", help="print the last losses, the best first")
    args = parser.parse_args(argv)
    sweep = read_sweep(args.file)
    runs = sweep.runs()
    if args.index is not None and not 0 <= args.index < len(runs):
        raise UserError(f"--index {args.index}: the sweep has {len(runs)} runs, from 0 to {len(runs) - 1}")
    if args.index is not None and args.slurm:
        raise UserError("--index and --slurm exclude each other: the script runs every index")
    chosen = runs if args.index is None else [runs[args.index]]
    if args.run:
        write_index(sweep, runs)
        return max(start(sweep, run) for run in chosen)
    if args.slurm:
        print(slurm_script(args.file, len(runs)))
    elif args.results:
        print_results(sweep, chosen)
    else:
        print(*(shlex.join(sweep.command(run)) for run in chosen), sep="\n")
    return 0


def write_index(sweep: Sweep, runs: Sequence[Run]) -> None:
    """Writes which values each run has, for plot_metrics. Raises UserError if the folder cannot be written."""
    content = [{"name": run.name, "values": dict(run.values)} for run in runs]
    try:
        sweep.save.mkdir(parents=True, exist_ok=True)
        (sweep.save / INDEX).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{sweep.save} cannot be written: {error.strerror or error}") from error


def start(sweep: Sweep, run: Run) -> int:
    """Runs one command, whose output goes to log.txt in its folder. Prints its result and returns 1 if it failed."""
    folder = sweep.save / run.name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "ab") as log:
        try:
            process = subprocess.Popen(sweep.command(run), stdout=log, stderr=subprocess.STDOUT)
        except OSError as error:
            raise UserError(f"launch {sweep.launch}: {error.strerror}") from error
        try:
            code = process.wait()
        except BaseException:  # a signal, after which the run saves a checkpoint and exits
            process.terminate()
            process.wait()
            raise
    loss = last_loss(folder) if code == 0 else None
    result = "no loss" if loss is None else f"loss {loss:.4f}"
    if code:
        result = f"failed with code {code}: {folder / 'log.txt'}"
    print(f"{run.name}: {result}", flush=True)
    return int(code != 0)


def slurm_script(file: Path, count: int) -> str:
    """Returns a script for sbatch. Options of the cluster can be given to sbatch."""
    this = shlex.join([sys.executable, str(Path(__file__).resolve()), str(file.resolve())])
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --array=0-{count - 1}",
            "#SBATCH --output=sweep-%A-%a.out",
            f"cd {shlex.quote(str(Path.cwd()))} && {this} --run --index $SLURM_ARRAY_TASK_ID",
        ]
    )


def print_results(sweep: Sweep, runs: Sequence[Run]) -> None:
    """Prints a line for each run that has a loss, the lowest first, then those without one."""
    losses = {run.name: last_loss(sweep.save / run.name) for run in runs}
    for name, loss in sorted(losses.items(), key=lambda pair: float("inf") if pair[1] is None else pair[1]):
        print(f"{name}: {'no loss yet' if loss is None else f'loss {loss:.4f}'}")


if __name__ == "__main__":
    run_main(main)
