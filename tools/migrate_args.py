"""Rewrites a command for another release of Megatron-LM in the flags of this program.

python tools/migrate_args.py -- torchrun --nproc_per_node 8 pretrain_gpt.py --model-parallel-size 2 --DDP-impl local

prints the command in today's flags. stderr lists the flags that were replaced, left out or are not supported; the exit
code is 2 if a flag is refused or unknown.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

from megatron.training.config.command_line import split_words, unknown_flag
from megatron.training.config.flag_table import flags_by_spelling
from megatron.training.config.retired import REFUSED, Occurrence, text_of, translate_all
from megatron.training.config.unsupported_flags import ACCEPTED_FLAGS

USAGE = "usage: python tools/migrate_args.py -- COMMAND"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints today's command for the words after --. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("--help", "-h"):
        print(f"{USAGE}\n\n{__doc__}", end="")
        return 0
    if words[0] != "--" or len(words) == 1:
        print(f"error: {USAGE}", file=sys.stderr)
        return 2
    start, flags = launcher_and_flags(words[1:])
    today, lines, problems = migrate(flags)
    for line in lines:
        print(line, file=sys.stderr)
    for line in problems:
        print(f"error: {line}", file=sys.stderr)
    print(shlex.join([*start, *today]))
    return 2 if problems else 0


def launcher_and_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divides a command after its script (the last word that ends in .py before one of our flags); all words are flags
    if there is no script."""
    scripts = [at for at, word in enumerate(words) if word.endswith(".py")]
    end = scripts[0] + 1 if scripts else 0
    return list(words[:end]), list(words[end:])


def migrate(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Returns today's words, a line for each flag that was replaced or left out, and a problem for each unsupported
    flag."""
    occurrences, strays = split_words(words)
    occurrences, lines = translate_all(occurrences)
    known = flags_by_spelling()
    today: list[Occurrence] = []
    problems = [f"{word}: this word belongs to no flag" for word in strays]
    for occurrence in occurrences:
        spelling = occurrence.spelling
        if spelling in ACCEPTED_FLAGS:
            lines.append(f"{text_of(occurrence)}: left out: {ACCEPTED_FLAGS[spelling]}")
        elif spelling in known:
            today.append(occurrence)
        else:
            problems.append(
                f"{spelling}: {REFUSED[spelling]}" if spelling in REFUSED else unknown_flag(spelling, known)
            )
    return [word for occurrence in today for word in (occurrence.spelling, *occurrence.words)], lines, problems


if __name__ == "__main__":
    run_main(main)
