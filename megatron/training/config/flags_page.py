"""The table of all flags in docs/flags.md: what each means, how it is answered, and the test that shows it.

python -m megatron.training.config.flags_page writes the page again.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.training.config.conditions import is_inert, is_to_come, needs_of
from megatron.training.config.flag_table import Flag, flag_table
from megatron.training.config.retired import REFUSED, RETIRED, Occurrence, translate
from megatron.training.config.unsupported_flags import ACCEPTED_FLAGS, REFUSED_FLAGS, refusal_of

Answer = Literal["a", "b", "c", "d"]
"""How a flag is answered: honoured, accepted with a reason, translated, or refused with a reason."""

_WALK = "tests/training/config/test_flags_page.py"
_INTRODUCTION = """# All flags

Made by `python -m megatron.training.config.flags_page`; do not edit.

| class | meaning |
|---|---|
| a | honoured; the test shows what it does |
| b | accepted; it cannot change the result here, and a printed line says why |
| c | translated into another flag, with a warning |
| d | refused, with the reason and what to give instead |

`--help GROUP` and `--help FLAG` print the same. Flags of the tools are in their `--help`.
"""

_TESTS_BY_OTHER_NAMES = {
    "--data-args-path": "tests/data/datasets/test_utils.py",
    "--no-mmap-bin-files": "tests/data/datasets/test_indexed_dataset.py",
    "--tokenizer-hf-include-special-tokens": "tests/data/tokenizer/test_huggingface.py",
    "--tiktoken-pattern": "tests/data/tokenizer/test_tiktoken.py",
    "--no-tokenizer-sentencepiece-ignore-extra-whitespaces": "tests/data/tokenizer/test_sentencepiece.py",
    "--no-manual-gc-eval": "tests/training/hooks/test_gc.py",
    "--lr-wsd-decay-samples": "tests/core/schedule/test_optimizer_param_scheduler.py",
    "--min-loss-scale": "tests/core/optimizer/test_grad_scaler.py",
    "--check-for-spiky-loss": "tests/training/logging/test_spikes.py",
    "--record-shapes": "tests/training/hooks/test_profiler.py",
    "--pytorch-profiler-collect-shapes": "tests/training/hooks/test_profiler.py",
    "--pytorch-profiler-collect-callstack": "tests/training/hooks/test_profiler.py",
}
"""Tests that show what a flag does through the parameter that it sets."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    group: str
    """Heading under which the flag stands."""
    spellings: tuple[str, ...]
    """All spellings of the flag."""
    meaning: str
    """What it means, or why it is answered as it is."""
    answer: Answer
    fields: tuple[str, ...] = ()
    """Names under which a test may mention it."""


def rows() -> list[Row]:
    """Returns a row for each flag that is known."""
    return [*_rows_of_fields(), *_rows_without_fields()]


def answer_of(flag: Flag) -> Answer:
    """Returns how a flag with a field is answered."""
    if is_to_come(flag):
        return "d"
    return "b" if is_inert(flag) else "a"


def _rows_of_fields() -> Iterator[Row]:
    for flag in flag_table().values():
        meaning, answer = flag.help, answer_of(flag)
        if answer == "b":
            reason = flag.declaration.no_effect or f"goes with {needs_of(flag)[0].flag.spelling}"
            meaning = f"{meaning} No effect: {reason}."
        elif answer == "d":
            meaning = f"{meaning} Refused: {refusal_of(flag.spelling)}."
        yield Row(flag.group, flag.spellings, meaning, answer, (flag.field,))


def _rows_without_fields() -> Iterator[Row]:
    for spelling in sorted(RETIRED):
        translation = translate(Occurrence(spelling))
        assert translation is not None
        yield Row("other names and retired flags", (spelling,), translation.warning.partition(": ")[2] + ".", "c")
    groups: tuple[tuple[str, Answer, Mapping[str, str]], ...] = (
        ("accepted without a field", "b", ACCEPTED_FLAGS),
        ("refused", "d", REFUSED | REFUSED_FLAGS),
    )
    for group, answer, reasons in groups:
        for spelling, reason in reasons.items():
            yield Row(group, (spelling,), f"{reason[0].upper()}{reason[1:]}.", answer)


def page(tests: Mapping[str, str], before: str = "") -> str:
    """Returns the text of docs/flags.md. `tests` are the test files by path; `before` is the page as it is, whose
    choice of tests is kept where it is still right."""
    chosen = chosen_tests(before)
    lines = [_INTRODUCTION]
    table = rows()
    for group in dict.fromkeys(row.group for row in table):
        lines += [
            f"## {group[0].upper()}{group[1:]}",
            "",
            "| flag | meaning | class | since | test |",
            "|---|---|---|---|---|",
        ]
        for row in table:
            if row.group == group:
                test = _test_of(row, tests, chosen.get(row.spellings[0], ""))
                name = ", ".join(f"`{spelling}`" for spelling in row.spellings)
                lines.append(f"| {name} | {row.meaning.replace('|', chr(92) + '|')} | {row.answer} | 0.1.0 | {test} |")
        lines.append("")
    return "\n".join(lines)


def chosen_tests(text: str) -> dict[str, str]:
    """Returns the test of each flag that a page names, by the flag's first spelling."""
    return dict(re.findall(r"^\| `(--[^`]+)`.*\| ([^|]*) \|$", text, re.MULTILINE))


def _test_of(row: Row, tests: Mapping[str, str], chosen: str) -> str:
    """Returns the test that shows what a flag does: the one chosen before, or the file that mentions the flag most
    often."""
    if row.answer == "c":
        return "tests/training/config/test_retired.py"
    if row.answer != "a":
        return _WALK
    chosen = _TESTS_BY_OTHER_NAMES.get(row.spellings[0], chosen)
    if mentions(row, tests.get(chosen, "")) or row.spellings[0] in _TESTS_BY_OTHER_NAMES:
        return chosen
    counts = {path: mentions(row, text) for path, text in tests.items()}
    best = max(sorted(counts), key=lambda path: counts[path], default="")
    return best if counts.get(best) else ""


def mentions(row: Row, text: str) -> int:
    """Returns how often a test mentions a flag: its spelling counts three times as much as the name of its field."""
    spelled = sum(len(re.findall(rf"{re.escape(spelling)}(?![\w-])", text)) for spelling in row.spellings)
    return 3 * spelled + sum(len(re.findall(rf"(?<![-\w]){field}(?![-\w])", text)) for field in row.fields)


def read_tests(root: Path) -> dict[str, str]:
    """Returns the text of all test files of a checkout by path, without those that are about the table itself."""
    about_tables = {_WALK, "tests/training/config/test_flag_table.py", "tests/training/config/test_help_text.py"}
    paths: Sequence[Path] = sorted((root / "tests").rglob("test_*.py"))
    named = {path.relative_to(root).as_posix(): path for path in paths}
    return {name: path.read_text("utf-8") for name, path in named.items() if name not in about_tables}


def main() -> int:
    """Writes docs/flags.md of this checkout. Returns 1, and names them, if no test mentions some honoured flags."""
    root = Path(__file__).parents[3]
    path = root / "docs/flags.md"
    text = page(read_tests(root), path.read_text("utf-8") if path.exists() else "")
    path.write_text(text, "utf-8")
    untested = [line.split("`")[1] for line in text.splitlines() if line.endswith("|  |")]
    for flag in untested:
        print(f"no test mentions {flag}", file=sys.stderr)
    return 1 if untested else 0


if __name__ == "__main__":
    sys.exit(main())
