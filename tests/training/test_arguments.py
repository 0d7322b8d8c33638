"""The command line, for the app and for user scripts."""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command_lines import ENTRY_DEFAULTS, SMALL, megatron_lm_commands, smallest_world
from support.programs import python

from megatron.training.arguments import config_of_command_line, configure
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment

ROOT = Path(__file__).parents[2]
COMMANDS = megatron_lm_commands()


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> "object":
    def set_to(flags: str) -> None:
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags.split()])

    return set_to


# ---------------------------------------------------------------------------------------------------------------------
# Megatron-LM's commands


def test_commands_for_megatron_lm_run_today_or_are_refused_for_reasons() -> None:
    """The number of those that run may only grow."""
    refused = 0
    for command in COMMANDS:
        argv, defaults = shlex.split(command["command"]), ENTRY_DEFAULTS.get(command["entry"])
        try:
            configure(argv, None, defaults, launch_environment=LaunchEnvironment(smallest_world(argv), True))
        except ConfigurationError as error:
            refused += 1
            strange = [problem for problem in error.problems if not _is_a_reason(problem)]
            assert not strange, (command["source"], strange)
    assert len(COMMANDS) == 201 and refused <= 5


def _is_a_reason(problem: str) -> bool:
    """Reasons: a GPU that the format needs, a feature out of scope, a file of another machine, or a real gap or
    contradiction in the command."""
    return any(
        words in problem
        for words in (
            "train_distilled.py --teacher DIR distils",
            "GPT2BPETokenizer needs both",  # BERT's commands, of which this is not the default tokenizer's script
            "is missing: ",  # commands that take their model from a checkpoint, or have no flags at all
            "spreads experts over ranks: it needs --num-experts",  # likewise
            "--tokenizer-model: a value is missing",  # the variable was not set
            "--num-layers 12 is not divisible by 8 pipeline stages",  # its variables have it so where nobody sets them
        )
    )


def test_commands_that_others_published_run() -> None:
    """Scripts of vendors, computing centres and guides."""
    commands = megatron_lm_commands("published_commands")
    for command in commands:
        argv = command["command"].split()
        ranks = 16 if "--hybrid-context-parallel" in argv else 1  # its rows of 131,072 have room on 16 ranks
        world = max(smallest_world(argv), ranks)
        configure(argv, None, None, launch_environment=LaunchEnvironment(world, True))
    assert len(commands) == 36


# ---------------------------------------------------------------------------------------------------------------------
# Programs


def test_a_program_prints_every_mistake_and_exits_with_2() -> None:
    """In a process of its own; the tests below call the function."""
    result = subprocess.run(
        [
            python(),
            "-c",
            "from megatron.training.arguments import config_of_command_line as c; c()",
            *f"{SMALL} --hiden-size 3 --lr x --tensor-model-parallel-size 2".split(),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert result.returncode == 2 and result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: --") or "ranks" in line for line in lines)


def test_only_the_first_rank_prints(command_line, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    command_line("--xyz")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as end:
        config_of_command_line()
    assert end.value.code == 2 and capsys.readouterr() == ("", "")


def test_a_wrong_world_size_is_a_mistake_too(command_line, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    command_line(SMALL)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(SystemExit) as end:
        config_of_command_line()
    assert end.value.code == 2 and "WORLD_SIZE many: expected" in capsys.readouterr().err


def test_a_right_command_line_prints_nothing(command_line, capsys) -> None:  # type: ignore[no-untyped-def]
    command_line(SMALL)
    assert config_of_command_line().transformer.num_layers == 2
    assert capsys.readouterr() == ("", "")


def test_help_is_grouped_and_shows_a_scripts_own_flags(command_line, capsys) -> None:  # type: ignore[no-untyped-def]
    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--my-flag", help="What it is.")
        return parser

    parts = ("checkpoints:\n", "--my-flag MY_FLAG", "What it is.")
    for words, further in (
        ("--help", ("model:\n  --num-layers --hidden-size", "--help SECTION")),
        ("--help all", ("model:\n  --num-layers N", "not supported (")),
    ):
        command_line(words)
        with pytest.raises(SystemExit) as end:
            config_of_command_line(provider)
        text = capsys.readouterr().out
        assert end.value.code == 0 and text.startswith("usage: ")
        assert [part for part in (*parts, *further) if part not in text] == []
        assert max(map(len, text.splitlines())) <= 120
