"""The tables of all flags in docs/flags.md: what each does, or why it has no effect or is refused.

python -m megatron.training.config.flags_page writes the page again.
"""

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
        rows = ((answer.spellings, answer.meaning) for answer in honoured if answer.group == group)
        lines += _section(group, "meaning", rows)
    for kind, title in _OTHERS:
        lines += _section(kind, title, _by_reason(answer for answer in table if answer.kind == kind))
    return "\n".join(lines)


def _by_reason(table: Iterable[Answer]) -> Iterator[tuple[list[str], str]]:
    """Yields the spellings of the flags with the same reason, and that reason as a sentence."""
    found: dict[str, list[str]] = {}
    for answer in table:
        found.setdefault(f"{answer.reason[0].upper()}{answer.reason[1:]}.", []).extend(answer.spellings)
    for reason, spellings in found.items():
        yield spellings, reason


def _section(name: str, title: str, rows: Iterable[tuple[Iterable[str], str]]) -> list[str]:
    lines = [f"## {name[0].upper()}{name[1:]}", "", f"| flag | {title} |", "|---|---|"]
    for spellings, text in rows:
        lines.append(f"| {', '.join(f'`{spelling}`' for spelling in spellings)} | {text.replace('|', chr(92) + '|')} |")
    return [*lines, ""]


def main() -> None:
    """Writes docs/flags.md of this checkout."""
    (Path(__file__).parents[3] / "docs/flags.md").write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
