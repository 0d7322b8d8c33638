"""Mistakes of a tool's command line are one sentence."""

import pytest

from megatron.core.exceptions import UserError
from megatron.training.config.tool_parser import ToolParser, number, whole_number


def parser() -> ToolParser:
    made = ToolParser(prog="tool.py", description="One.\n\n    two\n")
    made.add_argument("--size", type=number(1, 1e12, "8B"))
    made.add_argument("--count", type=whole_number(9, "3"))
    return made


def test_numbers_and_units() -> None:
    assert parser().parse_args(["--size", "1.5b", "--count", "9"]).size == 1.5e9
    assert parser().parse_args(["--size", "2e3"]).size == 2000
    assert "    two" in parser().format_help()


@pytest.mark.parametrize(
    "words", ["--size 0", "--size inf", "--size B", "--count 0", "--count 10", "--count \u0663", "--cou 1"]
)
def test_mistakes(words: str) -> None:
    with pytest.raises(
        UserError, match=r"^(--size: .*such as 8B|--count: .*such as 3|unrecognized arguments: --cou 1)$"
    ):
        parser().parse_args(words.split())
