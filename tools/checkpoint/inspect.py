"""Shows the contents of a checkpoint: the progress of its run, the flags of the run, and the tensors.

python tools/checkpoint/inspect.py --load checkpoints
python tools/checkpoint/inspect.py --load checkpoints --iteration 2000 --tensors 'decoder.layers.0.*'
"""

import os
import sys

# Python must not search this folder for modules: it would take this file for its own module inspect.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(os.path.dirname(_HERE)), *(path for path in sys.path if path != _HERE)]

import argparse  # noqa: E402
import fnmatch  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import shlex  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402

from megatron.interrupts import exit_quietly, run_main, tells_mistakes  # noqa: E402

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.core.dist_checkpointing.checkpoint import Checkpoint  # noqa: E402
from megatron.core.dist_checkpointing.checkpoint_selection import open_newest  # noqa: E402
from megatron.core.dist_checkpointing.chunk import is_optimizer_state  # noqa: E402
from megatron.core.utils.store_path import place  # noqa: E402


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--load", type=place, required=True, metavar="DIR", help="folder of checkpoints, as in a run's --save"
    )
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="iteration of the checkpoint; default: the newest whole checkpoint"
    )
    parser.add_argument(
        "--tensors",
        nargs="?",
        const="*",
        metavar="PATTERN",
        help="list all tensors, or those whose name matches a shell pattern",
    )
    args = parser.parse_args(argv)
    checkpoint = open_newest(args.load, args.iteration)
    print("\n".join(summary(checkpoint)))
    if args.tensors is not None:
        print("\n".join(tensor_lines(checkpoint, args.tensors)))
    return 0


def summary(checkpoint: Checkpoint) -> Iterator[str]:
    """Yields lines that summarize the checkpoint."""
    manifest = checkpoint.manifest
    yield f"{checkpoint.folder}: iteration {manifest.iteration}, {checkpoint.nbytes / 1e6:.1f} MB"
    yield "written by: " + ", ".join(f"{name} {size}" for name, size in manifest.layout.items())
    for title, of_optimizer in (("weights", False), ("optimizer state", True)):
        shapes = [
            stored[0].chunk.global_shape
            for name, stored in checkpoint.catalogue.items()
            if is_optimizer_state(name) == of_optimizer
        ]
        yield f"{title}: {len(shapes)} tensors, {sum(map(math.prod, shapes))} elements"
    for name, value in manifest.common.items():
        yield f"{name}: {json.dumps(value)}"
    words = manifest.config.get("command_line")
    if words:
        yield f"flags: {shlex.join(words)}"


def tensor_lines(checkpoint: Checkpoint, pattern: str) -> Iterator[str]:
    """Yields a line for each tensor whose name matches a shell pattern: name, type, shape, number of chunks."""
    for name, stored in sorted(checkpoint.catalogue.items()):
        if fnmatch.fnmatchcase(name, pattern):
            chunk = stored[0].chunk
            dtype = str(chunk.dtype).removeprefix("torch.")
            chunks = f"in {len(stored)} chunks" if len(stored) > 1 else ""
            yield f"  {name:<60} {dtype:<10} {list(chunk.global_shape)} {chunks}".rstrip()


if __name__ == "__main__":
    run_main(main)
