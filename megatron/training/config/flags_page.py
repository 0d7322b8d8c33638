"""The tables of all flags in docs/flags.md: what each does, or why it has no effect or is refused.

python -m megatron.training.config.flags_page writes the page again.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron.training.config.help_text import Answer, Kind, answers

_INTRODUCTION = """# All flags

Made by `python -m megatron.training.config.flags_page`; do not edit.

The sections with a flag per line have the flags that work, in the order of `--help`; the default is in brackets. The
last three sections have the other flags of Megatron-LM's releases, with the flags of one reason in one line:

- [translated](#translated): older and other names. The flag is replaced, and a warning says so.
- [accepted without effect](#accepted-without-effect): the flag cannot change the result. A printed line says why.
- [refused](#refused): an error with the reason and what to give instead.

`--help SECTION` and `--help FLAG` print the same sentences. Flags of the tools are in their `--help`.
"""

_OTHERS: tuple[tuple[Kind, str], ...] = (
    ("translated", "what happens"),
    ("accepted without effect", "reason"),
    ("refused", "reason"),
)
"""Sections of flags that do not work by themselves, and the title of their second column."""


def page() -> str:
    """Returns the text of docs/flags.md."""
    table = list(answers())
    honoured = [answer for answer in table if answer.kind == "honoured"]
    lines = [_INTRODUCTION]
    for group in dict.fromkeys(answer.group for answer in honoured):
        rows = (
            ([f"`{name}`" for name in answer.spellings], answer.meaning) for answer in honoured if answer.group == group
        )
        lines += _section(group, "meaning", rows)
    for kind, title in _OTHERS:
        lines += _section(kind, title, _by_reason(answer for answer in table if answer.kind == kind))
    return "\n".join(lines)


_OTHER_FLAG = re.compile(r"(Retired; read as|Another name; read as) (--\S+)\.")
"""Reasons that differ only in another flag, which then stands behind each flag instead."""


def _by_reason(table: Iterable[Answer]) -> Iterator[tuple[list[str], str]]:
    """Yields the flags with the same reason, as code, and that reason as a sentence."""
    found: dict[str, list[str]] = {}
    for answer in table:
        reason, behind = f"{answer.reason[0].upper()}{answer.reason[1:]}.", ""
        other = _OTHER_FLAG.fullmatch(reason)
        if other:
            reason, behind = f"{other[1]} the flag in brackets.", f" (`{other[2]}`)"
        found.setdefault(reason, []).extend(f"`{spelling}`{behind}" for spelling in answer.spellings)
    for reason, flags in found.items():
        yield flags, reason


def _section(name: str, title: str, rows: Iterable[tuple[Iterable[str], str]]) -> list[str]:
    lines = [f"## {name[0].upper()}{name[1:]}", "", f"| flag | {title} |", "|---|---|"]
    for flags, text in rows:
        lines.append(f"| {', '.join(flags)} | {text.replace('|', chr(92) + '|')} |")
    return [*lines, ""]


def main() -> None:
    """Writes docs/flags.md of this checkout."""
    (Path(__file__).parents[3] / "docs/flags.md").write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
