"""Rewrites a command or a shell script for another release of Megatron-LM in the flags of this program.

python tools/migrate_args.py -- torchrun --nproc_per_node 8 pretrain_gpt.py --model-parallel-size 2 --DDP-impl local

prints the command in today's flags.

python tools/migrate_args.py train.sh > migrated.sh

prints a script with its flags replaced and all else as it was: variables, arrays, other programs. stderr lists the
flags that were replaced, left out or are not supported; the exit code is 2 if a flag is refused, or, in a command,
unknown.
"""

import re
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly, run_main

    exit_quietly()

from torch.distributed.run import get_args_parser

from megatron.training.config.command_line import split_words, unknown_flag
from megatron.training.config.flag_table import flags_by_spelling
from megatron.training.config.retired import REFUSED, Occurrence, text_of, translate, translate_all
from megatron.training.config.unsupported_flags import ACCEPTED_FLAGS, REFUSED_FLAGS

USAGE = "usage: python tools/migrate_args.py SCRIPT, or python tools/migrate_args.py -- COMMAND"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints today's script, or today's command for the words after --. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("--help", "-h"):
        print(f"{USAGE}\n\n{__doc__}", end="")
        return 0
    if len(words) == 1 and not words[0].startswith("-"):
        return _print_script(Path(words[0]))
    if words[0] != "--" or len(words) == 1:
        print(f"error: {USAGE}", file=sys.stderr)
        return 2
    start, flags = launcher_and_flags(words[1:])
    today, lines, problems = migrate(flags)
    _report(lines, problems)
    print(shlex.join([*start, *today]))
    return 2 if problems else 0


def _report(lines: Sequence[str], problems: Sequence[str]) -> None:
    for line in [*lines, *(f"error: {problem}" for problem in problems)]:
        print(line, file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# Commands


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
    return [word for occurrence in today for word in occurrence.as_words()], lines, problems


# ---------------------------------------------------------------------------------------------------------------------
# Scripts

_VALUE = (
    r"""(?:=|(?:[ \t]|\\\n)+)(?!--)(?:"[^"\n]*"|'[^'\n]*'|(?![&|#])(?:\$\{[^}\n]*\}|\$\([^)\n]*\)|[^\s"'();|&\\])+)"""
)
"""A value on the line of its flag, or on the next one after a backslash."""
_FLAG = re.compile(rf"(?<![\w$/=-])(--[A-Za-z][\w-]*)((?:{_VALUE})*)")


@dataclass(frozen=True)
class ScriptFlag:
    """A flag in the text of a script."""

    begin: int
    end: int
    line: int
    occurrence: Occurrence
    """The flag, and its values as they are written, with quotes and variables."""


def _print_script(path: Path) -> int:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        print(f"error: {path}: {reason}; {USAGE}", file=sys.stderr)
        return 2
    today, lines, problems = migrate_script(text)
    _report([f"{path}:{line}" for line in lines], [f"{path}:{problem}" for problem in problems])
    print(today, end="")
    return 2 if problems else 0


def migrate_script(text: str) -> tuple[str, list[str], list[str]]:
    """Returns a shell script in today's flags, a line for each flag that was replaced, left out or is unknown, and a
    problem for each refused flag. Each begins with the number of the line. Unknown flags may be those of another
    program, so they are kept. The words of comments and torchrun's flags are kept too."""
    found = flags_of_script(text)
    known = {*flags_by_spelling(), *_of_torchrun()}
    given = {new.spelling for flag in found for new in (translate_of(flag) or [flag.occurrence])}
    lines: list[str] = []
    problems: list[str] = []
    for flag in reversed(found):  # from the end, so that the places of the others stay
        spelling, replacement = flag.occurrence.spelling, None
        translation = translate(flag.occurrence)
        if translation is not None:
            lines.append(f"{flag.line}: {translation.warning}")
            implied = [new for new in translation.implied if new.spelling not in given]
            replacement = " ".join(map(text_of, (*translation.occurrences, *implied)))
        elif spelling in ACCEPTED_FLAGS:
            lines.append(f"{flag.line}: {text_of(flag.occurrence)}: left out: {ACCEPTED_FLAGS[spelling]}")
            replacement = ""
        elif spelling in REFUSED or spelling in REFUSED_FLAGS:
            problems.append(f"{flag.line}: {spelling}: {(REFUSED | REFUSED_FLAGS)[spelling]}")
        elif spelling not in known:
            lines.append(f"{flag.line}: left as it is: {unknown_flag(spelling, flags_by_spelling())}")
        if replacement is not None:
            text = _without_empty_line(text[: flag.begin] + replacement, text[flag.end :])
    return text, lines[::-1], problems[::-1]


def translate_of(flag: ScriptFlag) -> tuple[Occurrence, ...]:
    """Returns the flags that replace a retired one, without those that it implies; none for another flag."""
    translation = translate(flag.occurrence)
    return () if translation is None else translation.occurrences


def flags_of_script(text: str) -> list[ScriptFlag]:
    """Returns the flags in a script, without those in comments."""
    found = []
    for match in _FLAG.finditer(text):
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if re.search(r"(?:^|\s)#", before):
            continue
        values = tuple(value.strip(" \t\\\n").removeprefix("=") for value in re.findall(_VALUE, match[2]))
        occurrence = Occurrence(match[1], values)
        found.append(ScriptFlag(match.start(), match.end(), text.count("\n", 0, match.start()) + 1, occurrence))
    return found


def _without_empty_line(before: str, after: str) -> str:
    """Joins the text before and after a replaced flag, without a line that only has a backslash."""
    line_begins = before.rfind("\n") + 1
    rest = re.match(r"[ \t]*\\\n", after)
    if rest is not None and not before[line_begins:].strip():
        return before[:line_begins] + after[rest.end() :]
    return before + after


def _of_torchrun() -> Collection[str]:
    return get_args_parser()._option_string_actions


if __name__ == "__main__":
    run_main(main)
