"""The command line, for the app and for user scripts."""

import argparse
import collections
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command_lines import ENTRY_DEFAULTS, SMALL, configured, megatron_lm_commands, smallest_world
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


@pytest.mark.parametrize("command", COMMANDS, ids=[row["source"] for row in COMMANDS])
def test_a_command_for_megatron_lm_makes_a_config_or_is_refused_for_reasons(command: dict[str, str]) -> None:
    argv, defaults = shlex.split(command["command"]), ENTRY_DEFAULTS.get(command["entry"])
    try:
        configure(argv, None, defaults, launch_environment=LaunchEnvironment(smallest_world(argv), True))
    except ConfigurationError as error:
        for problem in error.problems:
            assert _is_a_reason(problem), problem


def _is_a_reason(problem: str) -> bool:
    """Reasons: a GPU that the format needs, a feature out of scope, a file of another machine, or a real gap or
    contradiction in the command."""
    return any(
        words in problem
        for words in (
            "--fp8-recipe mxfp8 needs a Blackwell GPU",
            "distillation from a teacher is out of scope",
            "GPT2BPETokenizer needs both",  # BERT's commands, of which this is not the default tokenizer's script
            "is missing: ",  # commands that take their model from a checkpoint, or have no flags at all
            "spreads experts over ranks: it needs --num-experts",  # likewise
            "--tokenizer-model: a value is missing",  # the variable was not set
            "--num-layers 12 is not divisible by 8 pipeline stages",  # its variables have it so where nobody sets them
        )
    )


def test_how_many_commands_for_megatron_lm_run_today() -> None:
    """This number may only grow."""
    counts: collections.Counter[bool] = collections.Counter()
    for command in COMMANDS:
        argv, defaults = shlex.split(command["command"]), ENTRY_DEFAULTS.get(command["entry"])
        try:
            configure(argv, None, defaults, launch_environment=LaunchEnvironment(smallest_world(argv), True))
        except ConfigurationError:
            counts[False] += 1
        else:
            counts[True] += 1
    assert counts[True] >= 164 and counts.total() == 201


def test_the_oldest_guides_command_runs_as_it_is() -> None:
    config = configured(
        base="--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 12 --hidden-size 768 "
        "--num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 "
        "--global-batch-size 16 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine "
        "--min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 "
        "--data-path codeparrot_text_document --vocab-file vocab.json --merge-file merges.txt --save checkpoints "
        "--save-interval 1000 --log-interval 100 --eval-interval 1000 --eval-iters 10 "
        "--activations-checkpoint-method uniform"
    )
    transformer = config.transformer
    assert transformer.recompute_granularity == "full" and transformer.recompute_method == "uniform"
    assert transformer.recompute_num_layers == 1 and config.tokenizer.family == "GPT2BPETokenizer"
    assert config.data.split == "969,30,1"


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
