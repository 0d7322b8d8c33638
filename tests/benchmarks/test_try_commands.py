"""benchmarks/try_commands.py: commands are made small and run; the table says what became of each."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.command_lines import megatron_lm_commands
from support.programs import python

from benchmarks.small_commands import data_words, small_command
from benchmarks.try_commands import DEFAULTS, Outcome, main, table, words_of
from megatron.core.exceptions import UserError
from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment

TOOL = Path(__file__).parents[2] / "benchmarks/try_commands.py"
COMMANDS = megatron_lm_commands()

LARGE = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 2 --global-batch-size 512 --bf16 --swiglu "
    "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 4 "
    "--num-layers-per-virtual-pipeline-stage 2 --lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2000 "
    "--lr-decay-iters 90000 --train-iters 100000 --data-path /no/data --vocab-file /no/v --merge-file /no/m "
    "--save /no/checkpoints --load /no/checkpoints --save-interval 1000"
)


def small(argv: list[str], entry: str, processes: int, folder: Path) -> tuple[Any, int]:
    """The config of a small command as its ranks see it, and their number."""
    tail = data_words(entry, str(folder))
    (folder / "vocab.txt").write_text("x")
    alone = LaunchEnvironment(1, False, False)
    config = configure([*argv, *tail, "--dry-run"], None, DEFAULTS[entry], launch_environment=alone)
    words, ranks = small_command(config, argv, processes)
    there = LaunchEnvironment(ranks, False)
    return configure([*words, *tail], None, DEFAULTS[entry], launch_environment=there), ranks


@pytest.mark.parametrize(("processes", "layout"), [(1, (1, 1)), (2, (2, 1)), (4, (2, 2))])
def test_a_command_is_made_small(processes: int, layout: tuple[int, int], tmp_path: Path) -> None:
    config, ranks = small(LARGE.split(), "pretrain_gpt.py", processes, tmp_path)
    transformer = config.transformer
    assert ranks == processes and (config.grid.tensor, config.grid.pipeline) == layout
    assert transformer.hidden_size == 32 and transformer.num_query_groups == transformer.num_attention_heads // 2
    assert config.training.train_iters == 2 and config.schedule.lr_decay_style == "cosine"
    assert config.schedule.lr_decay_iters == 10 and config.schedule.lr_warmup_iters == 1 and transformer.bf16
    assert config.data.mock_data and config.data.data_path is None
    assert config.checkpoint.save == "save" and transformer.num_layers <= 16


def _accepted(rows: list[dict[str, str]], folder: Path) -> int:
    count = 0
    for row in rows:
        argv, entry = words_of(row), row["entry"]
        try:
            words, launch = [*argv, *data_words(entry, str(folder)), "--dry-run"], LaunchEnvironment(1, False, False)
            configure(words, None, DEFAULTS[entry], launch_environment=launch)
        except UserError:
            continue
        for processes in (1, 4):
            small(argv, entry, processes, folder)
        count += 1
    return count


def test_small_commands_are_accepted(tmp_path: Path) -> None:
    assert _accepted(COMMANDS[::12], tmp_path) >= 14


@pytest.mark.slow
def test_all_small_commands_are_accepted(tmp_path: Path) -> None:
    assert _accepted(COMMANDS, tmp_path) >= 187


def test_it_tries_commands(tmp_path: Path) -> None:
    """One that trains, the same again under another name, and one that is refused."""
    lines = [
        {"source": "first", "entry": "pretrain_gpt.py", "argv": LARGE.split()},
        {"source": "again", "entry": "pretrain_gpt.py", "command": LARGE.replace("4096", "8192")},
        {"source": "wrong", "entry": "pretrain_gpt.py", "argv": [*LARGE.split(), "--num-layers", "31"]},
    ]
    file, output = tmp_path / "commands.jsonl", tmp_path / "outcomes.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--check", "flags", "--processes", "1", "--output", str(output)]
    done = subprocess.run([python(), str(TOOL), str(file), *flags], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads(line) for line in output.read_text().splitlines()]
    assert [outcome["kind"] for outcome in outcomes] == ["trains", "trains", "refused"]
    assert done.stdout.count("\ntrains  ") + done.stdout.startswith("trains  ") == 1  # equal when small: run once
    assert "3 commands: 2 pass the check, 1 are refused" in done.stdout and "2 train (100.0%), 0 fail" in done.stdout


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (None, "nothing.jsonl cannot be read: "),
        ('{"entry": "pretrain_gpt.py"}', 'line 2: not an object with "argv" or "command"'),
        ("--num-layers 2", "line 2: not JSON: "),
        ('{"entry": "train.py", "argv": []}', 'line 2: "entry" is none of pretrain_gpt.py, '),
    ],
)
def test_a_file_that_is_no_list_of_commands(
    line: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nothing.jsonl"
    if line is not None:
        file.write_text(f"\n{line}\n")
    assert main([str(file)]) == 2
    assert says in capsys.readouterr().err


def test_the_table_counts_reasons() -> None:
    outcomes = [Outcome("a", "trains"), Outcome("b", "fails", ["x"]), Outcome("c", "refused", ["y", "y", "z"])]
    _, first, second, *reasons = table([*outcomes, Outcome("d", "refused", ["y"])])
    assert first == "4 commands: 2 pass the check, 2 are refused"
    assert second == "of those that pass, 1 train (50.0%), 1 fail"
    assert reasons == ["  refused    2  y", "  refused    1  z", "  fails      1  x"]
