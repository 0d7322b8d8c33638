"""The tables of docs/framework_keys.md: how each setting of DeepSpeed, Accelerate and Transformers is answered.

python -m megatron.training.config.foreign.page writes the page again.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.training.config.foreign.accelerate import ACCELERATE
from megatron.training.config.foreign.answers import Answer
from megatron.training.config.foreign.deepspeed import DEEPSPEED
from megatron.training.config.foreign.training_arguments import TRAINING_ARGUMENTS

_INTRODUCTION = """# Settings of DeepSpeed, Accelerate and Transformers

Made by `python -m megatron.training.config.foreign.page`; do not edit. [frameworks.md](frameworks.md) shows how to use
them.

- honoured: the setting becomes the flags in the table.
- accepted: the setting cannot change a result here. A printed line says why.
- refused: an error with the reason and what to give instead, unless the value asks for nothing (false, 0, none).

A key of a section that has one answer, such as `aio`, is answered like the section. `auto` leaves a setting to the
flags. An unknown name is an error that names the nearest known ones.
"""

_TABLES: tuple[tuple[str, Mapping[str, Answer]], ...] = (
    ("Keys of DeepSpeed's JSON", DEEPSPEED),
    ("Fields of Accelerate's files and plugins", ACCELERATE),
    ("Fields of TrainingArguments", TRAINING_ARGUMENTS),
)


_SAME_NAME = "the flag of the same name, such as `--lr-decay-style` of `lr_decay_style`"
_FLAG_BEHIND = "the flag in brackets"


def page() -> str:
    """Returns the text of docs/framework_keys.md."""
    lines = [_INTRODUCTION]
    for title, table in _TABLES:
        lines += [f"## {title}", "", "| names | answer | flags or reason |", "|---|---|---|"]
        lines += [*_rows(table), ""]
    return "\n".join(lines)


def _rows(table: Mapping[str, Answer]) -> Iterator[str]:
    """Yields a row for each answer, with all names that share it."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, answer in table.items():
        text, shown = answer.text, f"`{name}`"
        if name.rpartition(".")[2] == answer.field:
            text = _SAME_NAME
        elif re.fullmatch(r"`--[\w-]+`", text):
            text, shown = _FLAG_BEHIND, f"{shown} ({text})"
        names.setdefault((answer.kind, text), []).append(shown)
    for (kind, text), found in names.items():
        yield f"| {', '.join(found)} | {kind} | {text.replace('|', chr(92) + '|')} |"


def main() -> None:
    """Writes docs/framework_keys.md of this checkout."""
    (Path(__file__).parents[4] / "docs/framework_keys.md").write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
