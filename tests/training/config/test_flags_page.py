"""docs/flags.md is up to date, and --help says the same."""

import re
from pathlib import Path

from megatron.training.config.flags_page import page
from megatron.training.config.help_text import answers, help_about

PAGE = (Path(__file__).parents[3] / "docs/flags.md").read_text("utf-8")


def test_the_page_is_up_to_date() -> None:
    """To make it anew: python -m megatron.training.config.flags_page"""
    lines, expected = PAGE.splitlines(), page().splitlines()
    assert [line for line in expected if line not in lines] == [] and lines == expected


def test_help_of_a_flag_says_what_the_page_says() -> None:
    rows = re.findall(r"^\| (`--.*?[`)]) \| (.*) \|$", PAGE, flags=re.MULTILINE)
    texts = {
        spelling: text.replace("\\|", "|").replace("the flag in brackets", other)
        for cell, text in rows
        for spelling, other in re.findall(r"`([^`]+)`(?: \(`([^`]+)`\))?", cell)
    }
    assert texts.keys() == {spelling for answer in answers() for spelling in answer.spellings}
    for answer in answers():
        helped = "".join(help_about("x", answer.spellings[0]).split())  # lines of help break inside long names
        assert all("".join(texts[spelling].split())[1:] in helped for spelling in answer.spellings), helped
