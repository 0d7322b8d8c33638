"""tools/migrate_args.py: an old command in today's flags."""

import importlib
import shlex
from pathlib import Path

import pytest

from megatron.training.config.command_line import read_command_line


@pytest.fixture
def migrate(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    main = importlib.import_module("migrate_args").main

    def run(command):
        code = main(shlex.split(command))
        return code, *capsys.readouterr()

    return run


def test_an_old_command_in_todays_flags(migrate):
    code, command, lines = migrate(
        "-- torchrun --nproc_per_node 8 pretrain_gpt.py --model-parallel-size 2 --DDP-impl local --batch-size 4 "
        "--checkpoint-activations --data-path 'a b' --lr 1e-3 --modelopt-enabled"
    )
    assert code == 0
    launcher, flags = command.split("pretrain_gpt.py ")
    assert launcher == "torchrun --nproc_per_node 8 "
    line = read_command_line(shlex.split(flags))
    assert not line.problems and not line.warnings
    assert {field: line.values[field] for field in line.given} == {
        "tensor_model_parallel_size": 2,
        "micro_batch_size": 4,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "data_path": ["a b"],
        "lr": 1e-3,
    }
    assert [text.split(":")[0] for text in lines.splitlines()] == [
        *("--model-parallel-size 2", "--DDP-impl local", "--batch-size 4", "--checkpoint-activations"),
        "--modelopt-enabled",
    ]


def test_what_cannot_be_given_is_named(migrate):
    code, command, lines = migrate("-- --lr 1 --rl-profile --xyzzy 3 --moe-router-topk-limited-devices 2")
    assert code == 2 and command == "--lr 1\n"
    assert [text.split(":")[1].strip() for text in lines.splitlines()] == [
        "--rl-profile", "--xyzzy", "--moe-router-topk-limited-devices",
    ]  # fmt: skip
    assert migrate("--lr 1")[0] == 2 and migrate("--help")[0] == 0
