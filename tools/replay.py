"""Repeats the step that ended a run, in one process: python tools/replay.py SAVE/nonfinite/iteration_0000123

A run that ends because of a non-finite loss or gradient writes the step to disk: the state before it, and the
micro-batches of all ranks (--nonfinite-dump-dir). This tool loads both into one process without the run's layout,
computes forward and backward, and prints the loss of each micro-batch and the first module or weight whose values are
not finite.

    python tools/replay.py DUMP --script my_pretrain.py -- --fp64        # a script of your own; further flags

Exit code 0: all values are finite; 1: some value is not finite; 2: the dump or the flags are wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

from megatron.core.exceptions import UserError
from megatron.diagnosis.replay import DumpedStep, read_dump, replay, report
from megatron.programs import entry_script
from megatron.training.launch.errors import exit_with_problems
from tools.verify_layout import load_script


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="replay.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dump", type=Path, help="folder nonfinite/iteration_NNNNNNN that the run wrote")
    parser.add_argument("--script", type=Path, help="the run's script (default: pretrain_gpt.py or that of its family)")
    parser.add_argument("flags", nargs="*", help="after --: further flags, which replace those of the run")
    options = parser.parse_args(argv)
    try:
        dump = read_dump(options.dump)
        script = load_script(options.script or script_of(dump))
        if script.note is not None:
            print(script.note)
        result = replay(dump, script.providers, script.add_flags, options.flags)
    except UserError as error:
        exit_with_problems(error)
    print(*report(dump, result, options.flags), sep="\n", flush=True)
    return 1 if result.findings else 0


def script_of(dump: DumpedStep) -> Path:
    """Returns the entry script of the model family that the dump names. Raises UserError for an unknown family."""
    family = dump.manifest.config.get("model_family") or "gpt"
    if family not in ("gpt", "bert", "t5"):
        raise UserError(f"{dump.folder}: model family {family!r}: give its script with --script")
    return entry_script(family)


if __name__ == "__main__":
    run_main(main)
