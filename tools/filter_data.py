"""Drops rows by rules of quality, patterns, blocklists, and n-grams that they share with evaluation sets.

python tools/filter_data.py --input corpus.jsonl --output good --quality-rules gopher c4 --decontaminate evaluation

writes the kept rows into the folder good, and report.json with counts and examples by rule. docs/data.md says more.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.interrupts import exit_quietly, run_main, tells_mistakes, warn

if __name__ == "__main__":  # before the imports that take seconds
    exit_quietly()

from megatron.data.cleaning.config import FilterConfig
from megatron.data.cleaning.filtering import filter_rows
from megatron.data.cleaning.running import last_lines
from megatron.training.config.tool_flags import Section, read_tool_flags

USAGE = "python tools/filter_data.py --input FILE ... --output DIR [flags]"
ABOUT = "Drop rows that break rules about their text. The result is the same for any number of processes."


@tells_mistakes
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns its exit code."""
    try:
        section = Section("flags", FilterConfig)
        (config,) = read_tool_flags(sys.argv[1:] if argv is None else argv, [section], USAGE, ABOUT)
        report = filter_rows(config, warn)
    except KeyboardInterrupt:
        print("interrupted; nothing was written; the same command continues from the finished part", file=sys.stderr)
        return 130
    print(f"{config.output}: {report['kept_rows']:,} of {report['rows']:,} rows kept; dropped by rule:")
    for rule, count in report["dropped"].items():
        print(f"  {count:,} {rule}")
    for line in last_lines(report):
        print(line)
    return 0


if __name__ == "__main__":
    run_main(main)
