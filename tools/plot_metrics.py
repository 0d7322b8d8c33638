"""Plots the losses of one or several runs in one image, and below them throughput, memory, gradient norm or learning
rate.

python tools/plot_metrics.py runs/quickstart/metrics.jsonl --output loss.png
python tools/plot_metrics.py runs/a runs/b --labels "batch 256" "batch 512" --smooth 50 --panels throughput memory \
    --against tokens --output compared.png

python tools/plot_metrics.py --sweep runs/rates --output rates.png

A run is named by its metrics.jsonl or by its folder. --sweep draws the last loss of each run of tools/sweep.py.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.core.exceptions import UserError
from megatron.training.log.plot import PANELS, plot_metrics
from megatron.training.log.plot_sweep import plot_sweep


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("metrics", type=Path, nargs="*", help="metrics.jsonl of each run, or the folder that has it")
    parser.add_argument("--sweep", type=Path, metavar="DIR", help="folder of a sweep, in place of single runs")
    parser.add_argument(
        "--value", metavar="NAME", help="with --sweep: value to draw losses against (default: the first)"
    )
    parser.add_argument("--output", type=Path, help="image file to write (default: loss.png beside the first metrics)")
    parser.add_argument("--loss", default="lm loss", help="name of the loss to plot (default: %(default)s)")
    parser.add_argument("--title", help="title of the plot (default: name of the folder)")
    parser.add_argument("--labels", nargs="+", default=[], help="names of the runs (default: those of their folders)")
    parser.add_argument("--panels", nargs="+", default=[], choices=[*PANELS], help="panels to draw below the losses")
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N", help="draw means over N iterations (default: %(default)s)"
    )
    parser.add_argument(
        "--against",
        default="iteration",
        choices=["iteration", "tokens", "consumed samples"],
        help="what the horizontal axis counts (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if bool(args.metrics) == (args.sweep is not None):
        parser.error("give the metrics of runs, or --sweep DIR")
    if args.sweep is not None:
        return draw_sweep(args.sweep, args.output or args.sweep / "sweep.png", args.value)
    first = args.metrics[0]
    beside = first / "loss.png" if first.is_dir() else first.with_name("loss.png")
    if args.smooth < 1:
        raise UserError(f"--smooth {args.smooth}: give at least 1 iteration")
    picture = plot_metrics(
        args.metrics,
        args.output or beside,
        loss=args.loss,
        title=args.title,
        labels=args.labels,
        panels=args.panels,
        smooth=args.smooth,
        against=args.against,
    )
    print(picture)
    return 0


@tells_mistakes
def draw_sweep(folder: Path, picture: Path, value: str | None) -> int:
    """Draws the last losses of a sweep and returns the exit code."""
    print(plot_sweep(folder, picture, against=value))
    return 0


if __name__ == "__main__":
    run_main(main)
