"""Text for benchmarks/converge.sh, and its comparison of losses with those of two runs of an anchor."""

import argparse
import json
import re
import statistics
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.core.exceptions import UserError
from megatron.training.logging.jsonl import read_metrics

ENDINGS = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh")
LONGEST_FILE = 400_000
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


def smoothed(losses: dict[int, float], steps: list[int], window: int) -> dict[int, float]:
    """Returns the means of `window` steps, by the last of them."""
    return {
        steps[end - 1]: statistics.fmean(losses[step] for step in steps[end - window : end])
        for end in range(window, len(steps) + 1, window)
    }


def compare(ours: dict[int, float], anchor: dict[int, float], other: dict[int, float], window: int) -> list[str]:
    """Returns a table of smoothed losses; the last line says whether ours is within the spread of the anchor's seeds.

    That is so if the mean distance of ours to the anchor with the same samples is at most the mean distance between the
    anchor's two seeds. Raises UserError where runs have no steps in common.
    """
    steps = sorted(ours.keys() & anchor.keys() & other.keys())
    if len(steps) < window:
        raise UserError(f"the runs have {len(steps)} steps in common, fewer than the {window} of --window")
    means = [smoothed(losses, steps, window) for losses in (ours, anchor, other)]
    lines = ["| step | ours | anchor | anchor, other seed | ours - anchor | other seed - anchor |", "|" + "---|" * 6]
    for step, mine in means[0].items():
        theirs, others = means[1][step], means[2][step]
        values = f"{mine:.4f} | {theirs:.4f} | {others:.4f} | {mine - theirs:+.4f} | {others - theirs:+.4f}"
        lines.append(f"| {step} | {values} |")
    distance, spread = (
        statistics.fmean(abs(run[step] - means[1][step]) for step in run) for run in (means[0], means[2])
    )
    verdict = "within" if distance <= spread else "NOT within"
    lines.append(f"mean distance to the anchor: ours {distance:.4f}, other seed {spread:.4f}: {verdict} the spread")
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
    comparison = commands.add_parser("compare", help="compare the losses of three runs")
    comparison.add_argument("ours", type=Path, help="metrics.jsonl of ours")
    comparison.add_argument("anchor", type=Path, help="log of the anchor with the same samples")
    comparison.add_argument("other", type=Path, help="log of the anchor with another seed")
    comparison.add_argument("--window", type=int, default=100, help="steps of a mean (default: %(default)s)")
    comparison.add_argument("--picture", type=Path, help=".png file to write")
    comparison.add_argument("--title", default="", help="title of the picture")
    args = parser.parse_args(argv)
    try:
        if args.command == "text":
            print(f"{write_text(args.target, args.bytes)} characters")
            return 0
        ours, anchor, other = our_losses(args.ours), anchor_losses(args.anchor), anchor_losses(args.other)
        print(*compare(ours, anchor, other, args.window), sep="\n")
        if args.picture is not None:
            runs = {"ours": ours, "anchor": anchor, "anchor, other seed": other}
            draw(runs, max(1, args.window // 4), args.title, args.picture)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
