"""Averages the weights of several checkpoints of a run.

python tools/checkpoint/average.py --load checkpoints --last 5 --save averaged
python tools/checkpoint/average.py --load checkpoints --iterations 800 900 1000 --method ema --decay 0.5 --save averaged
python tools/checkpoint/average.py --load checkpoints --last 5 --method greedy --eval-tasks tasks.yaml \\
    --metric capitals/acc --save averaged

The result is a checkpoint named release with weights only, which --pretrained-checkpoint, tools/evaluate.py,
tools/generate.py and tools/checkpoint/convert.py take.
"""

import os
import sys

# Python must not search this folder for modules: it would take inspect.py for its own module of that name.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(os.path.dirname(_HERE)), *(path for path in sys.path if path != _HERE)]

from collections.abc import Iterator, Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from tempfile import TemporaryDirectory  # noqa: E402
from typing import Literal  # noqa: E402

from megatron.interrupts import exit_quietly, run_main, tells_mistakes  # noqa: E402

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.core.declarations.config_fields import flag  # noqa: E402
from megatron.core.dist_checkpointing.averaging import ema_shares, save_average  # noqa: E402
from megatron.core.dist_checkpointing.checkpoint import Checkpoint  # noqa: E402
from megatron.core.dist_checkpointing.checkpoint_selection import nothing_to_load, open_newest  # noqa: E402
from megatron.core.dist_checkpointing.folders import candidates  # noqa: E402
from megatron.core.exceptions import UserError  # noqa: E402
from megatron.core.utils.store_path import local_folder, place  # noqa: E402
from megatron.training.config.tool_flags import Section, read_tool_flags  # noqa: E402
from tools.evaluate import EvaluateConfig, evaluate  # noqa: E402

USAGE = "python tools/checkpoint/average.py --load DIR (--iterations N ... | --last N) --save DIR [flags]"
ABOUT = "Averages the weights of several checkpoints of a run into one."


@dataclass(kw_only=True, frozen=True)
class AverageConfig:
    """Flags of the tool."""

    load: str | None = None
    """Folder of checkpoints, as in a run's --save. Required."""

    iterations: list[int] | None = flag(None, nargs="+")
    """Iterations of the checkpoints. This or --last is required."""

    last: int | None = None
    """Number of the newest checkpoints to average."""

    save: str | None = None
    """Folder to write the checkpoint release to. Required."""

    method: Literal["uniform", "ema", "greedy"] = "uniform"
    """uniform: equal shares. ema: exponential moving average from the oldest to the newest. greedy: equal shares of
    those checkpoints that improve the score: from the best one on, each is added if the score does not get worse."""

    decay: float = flag(0.5, only_with="method=ema")
    """Decay of the moving average from one checkpoint to the next."""

    eval_tasks: str | None = flag(None, only_with="method=greedy")
    """File of evaluation tasks, for the score of --method greedy (docs/evaluation.md)."""

    metric: str | None = flag(None, only_with="method=greedy")
    """The score: TASK/METRIC, such as capitals/acc. Perplexities and bits per byte should be low, others high."""


def problems_of(config: AverageConfig) -> Iterator[str]:
    """Yields a problem for each flag that is missing or impossible."""
    for name in ("load", "save"):
        if getattr(config, name) is None:
            yield f"{{{name}:name}} is required"
    if (config.iterations is None) == (config.last is None):
        yield "give one of {iterations:name} and {last:name}"
    if config.last is not None and config.last < 2:
        yield "{last} must be at least 2"
    if config.iterations is not None and len(set(config.iterations)) < 2:
        yield "{iterations} must be two different ones or more"
    if not 0.0 < config.decay < 1.0:
        yield "{decay} must be larger than 0 and less than 1"
    if config.method == "greedy" and (config.eval_tasks is None or "/" not in (config.metric or "")):
        yield "{method} needs {eval_tasks:name} FILE and {metric:name} TASK/METRIC"


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    sections = [Section("averaging", AverageConfig, lambda config: list(problems_of(config)))]
    (config,) = read_tool_flags(sys.argv[1:] if argv is None else argv, sections, USAGE, ABOUT)
    average(config)
    return 0


def average(config: AverageConfig) -> None:
    """Writes the average, and prints where it is and what it consists of."""
    chosen = open_all(place(config.load or ""), config)
    root = local_folder("--save", config.save or "")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UserError(f"--save {root} is no empty folder; name a folder that is empty or does not exist")
    if not root.absolute().parent.is_dir():
        raise UserError(f"--save {root}: the folder {root.absolute().parent} does not exist")
    if config.method == "greedy":
        chosen = greedy(chosen, config)
    shares = [1.0 / len(chosen)] * len(chosen) if config.method != "ema" else ema_shares(len(chosen), config.decay)
    folder = write(chosen, shares, root)
    parts = ", ".join(f"{each.manifest.iteration} ({share:.3g})" for each, share in zip(chosen, shares, strict=True))
    print(f"{folder}: the average of the iterations {parts}")


def open_all(root: Path, config: AverageConfig) -> list[Checkpoint]:
    """Returns the checkpoints to average, oldest first. Raises UserError if one is missing or broken."""
    there = sorted(folder.step for folder in candidates(root) if isinstance(folder.step, int))
    if not there:
        raise nothing_to_load(root)
    if config.last is not None and config.last > len(there):
        raise UserError(f"--last {config.last}: {root} holds {len(there)} checkpoints")
    steps = sorted(set(config.iterations)) if config.iterations is not None else there[-(config.last or 0) :]
    return [open_newest(root, step, log=lambda sentence: None) for step in steps]


def write(chosen: Sequence[Checkpoint], shares: Sequence[float], root: Path) -> Path:
    """Writes an average and returns its folder."""
    iterations = [each.manifest.iteration for each in chosen]
    return save_average(chosen, shares, root, {"averaged": {"iterations": iterations, "shares": list(shares)}}).folder


def greedy(checkpoints: Sequence[Checkpoint], config: AverageConfig) -> list[Checkpoint]:
    """Returns the checkpoints whose uniform average is the greedy soup (Wortsman et al. 2022, recipe 1)."""

    def score(chosen: Sequence[Checkpoint]) -> float:
        title = f"average of the iterations {', '.join(str(each.manifest.iteration) for each in chosen)}"
        with TemporaryDirectory(
            prefix="average-", dir=local_folder("--save", config.save or "").absolute().parent
        ) as folder:
            write(chosen, [1.0 / len(chosen)] * len(chosen), Path(folder) / "candidate")
            return score_of(Path(folder) / "candidate", config, title)

    alone = [(score([each]), each) for each in checkpoints]
    ranked = sorted(alone, key=lambda pair: -pair[0])
    best, kept = ranked[0][0], [ranked[0][1]]
    for _, each in ranked[1:]:
        found = score([*kept, each])
        if found >= best:
            best, kept = found, [*kept, each]
    return sorted(kept, key=lambda each: each.manifest.iteration)


def score_of(root: Path, config: AverageConfig, title: str | None = None) -> float:
    """Returns the score of the checkpoint under `root`; more is better."""
    task, _, metric = (config.metric or "").rpartition("/")
    scores = evaluate(EvaluateConfig(load=str(root), eval_tasks=config.eval_tasks), title)
    found = {each.task: each.pairs for each in scores}
    if metric not in found.get(task, {}):
        known = ", ".join(f"{name}/{each}" for name, pairs in found.items() for each in pairs)
        raise UserError(f"--metric {config.metric}: the scores are {known}")
    value = found[task][metric][0]
    return -value if "perplexity" in metric or "bits" in metric else value


if __name__ == "__main__":
    run_main(main)
