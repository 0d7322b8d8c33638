"""megatron/training/config/tool_flags.py: a tool's flags from its dataclasses; every mistake at once."""

from dataclasses import dataclass
from typing import Literal

import pytest

from megatron.core.declarations.config_fields import flag, not_yet
from megatron.core.exceptions import UserError
from megatron.training.config.tool_flags import (
    Section,
    ToolParser,
    number,
    read_tool_flags,
    whole_number,
    with_commands_of_wheel,
)


@dataclass(kw_only=True, frozen=True)
class First:
    name: str | None = None
    """A name."""

    mode: Literal["fast", "slow"] = "fast"
    """How to go."""

    count: int = 3
    """How many."""

    loud: bool = False
    """Say more."""

    old: int | None = flag(None, no_effect="nobody needs it")
    """For older releases."""

    gears: int = flag(1, only_with="mode=slow")
    """With --mode slow: gears."""


@dataclass(kw_only=True, frozen=True)
class Second:
    words: list[str] = flag(default_factory=lambda: ["a"])
    """Some words."""

    later: bool = not_yet(False)
    """To come."""


def rule(config):
    if config.name is None:
        yield "{name:name}: missing"
    if config.count < 1:
        yield "{count}: must be at least 1"


def read(line):
    return read_tool_flags(
        line.split(), [Section("one", First, rule), Section("two", Second)], "tool", "About.", {"--nom": "--name"}
    )


def test_values(capsys):
    configs = read("--name x --count 5 --loud --words p q --mode slow --gears 2")
    assert configs == (First(name="x", count=5, loud=True, mode="slow", gears=2), Second(words=["p", "q"]))
    assert capsys.readouterr() == ("", "")
    assert read("--name x")[1] == Second(words=["a"])


def test_what_is_taken_otherwise_is_said(capsys):
    read("--nom x --old 1 --gears 3")
    assert capsys.readouterr().err.splitlines() == [
        "warning: --nom: read as --name",
        "warning: --old: no effect: nobody needs it",
        "warning: --gears: no effect without --mode slow",
    ]


def test_all_mistakes_at_once():
    with pytest.raises(UserError) as error:
        read("stray --count 0 --mode quick --later --cuont 3 --words")
    assert str(error.value).splitlines() == [
        "stray: this word belongs to no flag",
        "--mode quick: choose from fast, slow",
        "--cuont: unknown flag; did you mean --count?",
        "--words: a value is missing",
        "--name: missing",
        "--count 0: must be at least 1",
        "--later: not yet",
    ]


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    assert "usage: tool" in capsys.readouterr().out
    for words in ("--help --count 3", "--help count"):
        with pytest.raises(SystemExit):
            read(words)
        printed = capsys.readouterr().out
        assert "--count N" in printed and "--mode" not in printed


def test_a_flag_that_gathers_adds_and_others_start_again() -> None:
    @dataclass(kw_only=True, frozen=True)
    class Both:
        all: list[str] | None = flag(None, gathers=True)
        last: list[str] | None = None

    words = ["--all", "a", "b", "--last", "a", "b", "--all", "c", "--last", "c"]
    (config,) = read_tool_flags(words, [Section("both", Both)], "tool", "about")
    assert (config.all, config.last) == (["a", "b", "c"], ["c"])


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


def test_help_in_a_wheel_names_no_folder_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "usage: python tools/checkpoint/convert.py DIR"
    assert with_commands_of_wheel(text) == text
    monkeypatch.setattr("sys.argv", ["/venv/site-packages/megatron/checkout/tools/checkpoint/convert.py"])
    assert with_commands_of_wheel(text) == "usage: python -m megatron checkpoint/convert DIR"
