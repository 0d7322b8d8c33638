"""Checks which checkpoints of a folder are complete, and reports the damage of the others.

python tools/checkpoint/verify.py --load checkpoints
python tools/checkpoint/verify.py --load checkpoints --iteration 2000 --quick

Reads every byte and compares every checksum. Exit code: 0 if all checkpoints are complete, 1 if one is broken, 2 if
there is no checkpoint or the command line is wrong.
"""

import os
import sys

# Python must not search this folder for modules: it would take inspect.py for its own module of that name.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(os.path.dirname(_HERE)), *(path for path in sys.path if path != _HERE)]

import argparse  # noqa: E402
from collections.abc import Sequence  # noqa: E402

from megatron.interrupts import exit_quietly, run_main, tells_mistakes  # noqa: E402

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.core.dist_checkpointing.checkpoint import verify  # noqa: E402
from megatron.core.dist_checkpointing.checkpoint_selection import nothing_to_load, select_folders  # noqa: E402
from megatron.core.dist_checkpointing.folders import Folder, candidates, is_foreign  # noqa: E402
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
    parser.add_argument("--iteration", type=int, metavar="N", help="check only the checkpoint of this iteration")
    parser.add_argument(
        "--quick", action="store_true", help="check sizes, headers and digests only; do not read the tensors"
    )
    args = parser.parse_args(argv)
    choice = select_folders(args.load, args.iteration)
    checked = [f for f in reversed(candidates(args.load)) if args.iteration in (None, f.step)]
    if not checked:
        raise nothing_to_load(args.load)
    whole = {folder.path.name: report(folder, not args.quick) for folder in checked}
    for note in choice.notes:
        print(note)
    if args.iteration is None:
        found = next((name for name in choice.folders if whole.get(name)), None)
        print(f"a run would load {found}" if found else "no run could load any of these")
    return 0 if all(whole.values()) else 1


def report(folder: Folder, tensors: bool) -> bool:
    """Prints the state of one checkpoint; returns whether it is whole. `tensors`: also read all tensors."""
    if is_foreign(folder.path):
        print(f"{folder.path.name}: another program's checkpoint")
        return False
    checkpoint, findings = verify(folder.path, tensors)
    if findings or checkpoint is None:
        print(f"{folder.path.name}: BROKEN", *findings, sep="\n  ", flush=True)
        return False
    found = f"{len(checkpoint.catalogue)} tensors, {checkpoint.nbytes / 1e6:.1f} MB"
    print(f"{folder.path.name}: whole ({found}, written by {len(checkpoint.indexes)} ranks)", flush=True)
    return True


if __name__ == "__main__":
    run_main(main)
