"""Prepares the text for benchmarks/converge.sh, and compares the losses of its runs: those of this project and an
anchor."""

import argparse
import json
import re
import statistics
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.training.log.jsonl import read_metrics

ENDINGS = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh")
LONGEST_FILE = 400_000
FIRST = 20
"""Number of steps at the start of a run whose losses are compared one by one."""
_STEP = re.compile(r"iteration +([0-9]+)/.*?lm loss: ([0-9.E+-]+)")


def environment_texts() -> Iterator[str]:
    """Yields the sources and documents of Python's library and of the installed packages, in a fixed order."""
    for folder in sorted({sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]}):
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix in ENDINGS and path.is_file() and path.stat().st_size <= LONGEST_FILE:
                text = path.read_text(encoding="utf-8", errors="ignore")
                if text.strip():
                    yield text


def write_text(target: Path, most: int) -> int:
    """Writes at most about `most` bytes of text as .jsonl. Returns the bytes of text."""
    written = 0
    with open(target, "w", encoding="utf-8") as file:
        for text in environment_texts():
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text)
            if written >= most:
                break
    return written


def anchor_losses(log: Path) -> dict[int, float]:
    """Returns the loss of each step of an anchor's log."""
    losses = {int(step): float(loss) for step, loss in _STEP.findall(log.read_text())}
    if not losses:
        raise UserError(f"{log}: no line has an iteration and its lm loss")
    return losses


def our_losses(metrics: Path) -> dict[int, float]:
    """Returns the loss of each step of a metrics.jsonl."""
    steps, losses = read_metrics(metrics).series("lm loss")
    return dict(zip(steps, losses, strict=True))


def read_runs(texts: Sequence[str]) -> dict[str, dict[int, float]]:
    """Returns the losses of runs, given as NAME=FILE, by name. A run without a step is left out, and a line says so."""
    runs = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals:
            raise UserError(f"{text}: write NAME=FILE")
        try:
            runs[name] = (our_losses if file.endswith(".jsonl") else anchor_losses)(Path(file))
        except (UserError, OSError) as error:
            if not runs:
                raise UserError(f"the reference {name} has no losses: {error}") from error
            print(f"{name} is left out: {error}")
    return runs


def smoothed(losses: dict[int, float], steps: list[int], window: int) -> dict[int, float]:
    """Returns the means of `window` steps, by the last of them."""
    return {
        steps[end - 1]: statistics.fmean(losses[step] for step in steps[end - window : end])
        for end in range(window, len(steps) + 1, window)
    }


@dataclass(frozen=True)
class Distance:
    """How far the smoothed losses of a run are from those of the reference, over the windows that both have."""

    steps: int
    """Number of steps that both runs have."""
    at_start: float
    """Median size of the differences of the first FIRST steps: what rounding does in one step, before it adds up."""
    differences: dict[int, float]
    """Mean loss of the run minus that of the reference, by the last step of each window."""

    @property
    def mean(self) -> float:
        """Mean size of the differences."""
        return statistics.fmean(map(abs, self.differences.values()))

    @property
    def at_end(self) -> float:
        """Signed mean of the last quarter of the differences. It shows a drift."""
        values = list(self.differences.values())
        return statistics.fmean(values[-max(1, len(values) // 4) :])


def distance(run: dict[int, float], reference: dict[int, float], window: int) -> Distance:
    """Returns the distance of a run to the reference. Windows with a step that the run does not have are left out."""
    steps = sorted(reference)
    common = sorted(run.keys() & reference.keys())
    whole = [steps[end - window : end] for end in range(window, len(steps) + 1, window)]
    return Distance(
        len(common),
        statistics.median([abs(run[step] - reference[step]) for step in common[:FIRST]] or [0.0]),
        {
            part[-1]: statistics.fmean(run[step] - reference[step] for step in part)
            for part in whole
            if run.keys() >= set(part)
        },
    )


def compare(runs: dict[str, dict[int, float]], spread_of: str, window: int) -> list[str]:
    """Returns two tables in Markdown, and a verdict for each run of this project, whose name begins with "ours".

    The first of `runs` is the reference: the anchor with the same samples. A run of this project is within the
    spread if its mean distance to the reference is at most that of the run `spread_of`. Runs may end early. Raises
    UserError if no run has a whole window in common with the reference.
    """
    (first, reference), *others = runs.items()
    found = {name: distance(losses, reference, window) for name, losses in others}
    distances = {name: d for name, d in found.items() if d.differences}
    lines = [
        f"{name} is left out: it has {d.steps} steps in common with {first}, not one whole window of {window}"
        for name, d in found.items()
        if name not in distances
    ]
    if not distances:
        raise UserError("; ".join(lines) or f"there is no run to compare with {first}")
    columns = "".join(f" {name} - {first} |" for name in distances)
    lines += [f"| step | {first} |{columns}", "|" + "---|" * (2 + len(distances))]
    for step, mean in smoothed(reference, sorted(reference), window).items():
        shown = [d.differences.get(step) for d in distances.values()]
        lines.append(f"| {step} | {mean:.4f} |" + "".join(" |" if d is None else f" {d:+.4f} |" for d in shown))
    lines += ["", f"| run | steps | steps 1 to {FIRST} | mean distance to {first} | last quarter |", "|" + "---|" * 5]
    lines += [
        f"| {name} | {d.steps} | {d.at_start:.5f} | {d.mean:.4f} | {d.at_end:+.4f} |" for name, d in distances.items()
    ]
    lines.append("")
    for name in distances:
        if name.startswith("ours") and spread_of in distances:
            verdict = "within" if distances[name].mean <= distances[spread_of].mean else "NOT within"
            lines.append(f"{name}: {verdict} the spread of {spread_of}")
    return lines


def draw(runs: dict[str, dict[int, float]], window: int, title: str, picture: Path) -> None:
    """Draws the smoothed losses of runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axis = figure.subplots()
    for name, losses in runs.items():
        points = smoothed(losses, sorted(losses), window)
        axis.plot(list(points), list(points.values()), linewidth=1.2, label=name)
    axis.set_xlabel("iteration")
    axis.set_ylabel(f"lm loss, mean of {window} steps")
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(picture, format="png")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    text = commands.add_parser("text", help="write the text of this machine's Python packages")
    text.add_argument("target", type=Path, help=".jsonl file to write")
    text.add_argument("--bytes", type=int, default=120_000_000, help="most text to write (default: %(default)s)")
    comparison = commands.add_parser("compare", help="compare the losses of runs")
    comparison.add_argument(
        "runs",
        nargs="+",
        metavar="NAME=FILE",
        help="a metrics.jsonl of this project, or a log of the anchor; the first run is the reference, and the runs of "
        'this project have names that begin with "ours"',
    )
    comparison.add_argument(
        "--spread-of", default="other-seed", help="run whose distance to the reference is the spread (%(default)s)"
    )
    comparison.add_argument("--window", type=int, default=100, help="steps of a mean (default: %(default)s)")
    comparison.add_argument("--picture", type=Path, help=".png file to write")
    comparison.add_argument("--title", default="", help="title of the picture")
    args = parser.parse_args(argv)
    try:
        if args.command == "text":
            print(f"{write_text(args.target, args.bytes)} characters")
            return 0
        runs = read_runs(args.runs)
        print(*compare(runs, args.spread_of, args.window), sep="\n")
        if args.picture is not None:
            draw(runs, max(1, args.window // 4), args.title, args.picture)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
