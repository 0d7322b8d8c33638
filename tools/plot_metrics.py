"""Plots training loss, validation loss and learning rate of a run.

python tools/plot_metrics.py runs/quickstart/metrics.jsonl --output loss.png
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.exceptions import UserError
from megatron.training.logging.plot import plot_metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a run")
    parser.add_argument("--output", type=Path, help="image file to write (default: loss.png beside the metrics)")
    parser.add_argument("--loss", default="lm loss", help="name of the loss to plot (default: %(default)s)")
    parser.add_argument("--title", help="title of the plot (default: name of the folder)")
    args = parser.parse_args(argv)
    try:
        picture = plot_metrics(
            args.metrics, args.output or args.metrics.with_name("loss.png"), loss=args.loss, title=args.title
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
