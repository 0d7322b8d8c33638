"""Every flag of Megatron-LM is answered as docs/flags.md says; the page is up to date."""

import json
import os
from pathlib import Path

import pytest
from support.command_lines import SMALL, problems_of, words_of

from megatron.training.config.command_line import read_command_line
from megatron.training.config.conditions import is_to_come
from megatron.training.config.flag_table import flag_table, flags_by_spelling
from megatron.training.config.flags_page import Row, chosen_tests, mentions, page, read_tests, rows
from megatron.training.config.unsupported_flags import refusal_of

ROOT = Path(__file__).parents[3]
NAMES = (ROOT / "tests/data/flags/megatron_lm_names.txt").read_text("utf-8").split()
ROWS = {spelling: row for row in rows() for spelling in row.spellings}
PAGE = (ROOT / "docs/flags.md").read_text("utf-8")
TESTS = read_tests(ROOT)


def test_every_flag_of_megatron_lm_has_one_row() -> None:
    assert [name for name in NAMES if name not in ROWS] == []
    spellings = [spelling for row in rows() for spelling in row.spellings]
    assert len(spellings) == len(set(spellings))


def test_the_page_is_up_to_date() -> None:
    """To make it anew: python -m megatron.training.config.flags_page"""
    lines, expected = PAGE.splitlines(), page(TESTS, PAGE).splitlines()
    assert [line for line in expected if line not in lines] == [] and lines == expected


def test_every_honoured_flag_has_a_test() -> None:
    tests = chosen_tests(PAGE)
    assert [row.spellings[0] for row in rows() if not (ROOT / tests[row.spellings[0]]).is_file()] == []
    assert mentions(ROWS["--lr"], "--lr 1 --lr-decay-style x config.lr") == 4


@pytest.mark.parametrize("spelling", sorted(ROWS))
def test_a_flag_is_answered_as_the_page_says(spelling: str) -> None:
    row: Row = ROWS[spelling]
    flag = flags_by_spelling().get(spelling)
    words = words_of(flag) if flag is not None else ["1"] if spelling in NEEDS_A_WORD else []
    words = [os.devnull] if spelling in ("--config", "--yaml-cfg") else words
    line = read_command_line([*SMALL.split(), spelling, *words])
    if row.answer == "c":
        assert any(spelling in warning for warning in line.warnings) and not line.problems
    elif flag is None:
        said = line.warnings if row.answer == "b" else line.problems
        expected = f"{spelling}: " + row.meaning[:1].lower() + row.meaning[1:].removesuffix(".")
        assert [text.lower() for text in said] == [expected.lower()]
        assert not (line.problems if row.answer == "b" else line.warnings)
    else:
        assert not line.problems and spelling in line.given.values()
        alone = is_to_come(flag) and not flag.declaration.only_with
        if alone and line.values[flag.field] != flag.default:
            problems = problems_of(f"{spelling} {' '.join(words)}")
            expected = row.meaning.rpartition("Refused: ")[2].removesuffix(".")
            assert any(text.startswith(spelling) and expected in text for text in problems), problems


def test_a_flag_that_never_works_has_its_reason() -> None:
    for flag in flag_table().values():
        supported = flag.declaration.supported
        nothing = supported is not None and all(value is None or value is False for value in supported)
        assert refusal_of(flag.spelling) or not (nothing or is_to_come(flag)), flag.spelling


NEEDS_A_WORD = {"--batch-size", "--model-parallel-size", "--checkpoint-num-layers", "--yarn-beta-fast"} | {
    "--activations-checkpoint-num-layers", "--yarn-beta-slow", "--yarn-original-max-position-embeddings",
    "--hybrid-override-pattern", "--layernorm-epsilon", "--local_rank", "--s3-cache-path",
}  # fmt: skip
"""Flags that are translated into one with a value."""


def test_the_list_of_names_is_that_of_the_releases() -> None:
    known = (ROOT / "tests/data/flags/megatron_lm_flags.jsonl").read_text("utf-8").splitlines()
    assert {json.loads(line)["flag"] for line in known} <= set(NAMES) and len(NAMES) == 919
