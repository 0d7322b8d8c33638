"""Removes rows whose text repeats, or nearly repeats, an earlier one.

python tools/dedup.py --input corpus.jsonl --output unique --method both --threshold 0.8

writes the kept rows into the folder unique, and report.json with counts and examples. docs/data.md says more.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes, warn

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.data.cleaning.config import DedupConfig
from megatron.data.cleaning.dedup import deduplicate
from megatron.data.cleaning.running import last_lines
from megatron.training.config.tool_flags import Section, read_tool_flags

USAGE = "python tools/dedup.py --input FILE ... --output DIR [flags]"
ABOUT = (
    "Remove rows whose text equals an earlier one, or whose word 5-grams are nearly the same. The result is the same "
    "for any number of processes."
)


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns its exit code."""
    try:
        section = Section("flags", DedupConfig)
        (config,) = read_tool_flags(sys.argv[1:] if argv is None else argv, [section], USAGE, ABOUT)
        report = deduplicate(config, warn)
    except KeyboardInterrupt:
        print("interrupted; nothing was written; the same command continues from the finished part", file=sys.stderr)
        return 130
    print(
        f"{config.output}: {report['kept_rows']:,} of {report['rows']:,} rows kept, {report['changed_rows']:,} of them "
        f"shorter; duplicates: {report['equal']:,} equal, {report['similar']:,} similar"
    )
    for line in last_lines(report):
        print(line)
    return 0


if __name__ == "__main__":
    run_main(main)
