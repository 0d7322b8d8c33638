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


SCRIPT = r"""#!/bin/bash
# an old one: --batch-size 1
DISTRIBUTED_ARGS="--nproc_per_node $GPUS --master_addr localhost"
GPT_ARGS="
    --num-layers 24 --model-parallel-size ${TP:-2} \
    --DDP-impl local \
    --checkpoint-activations --no-query-key-layer-scaling
    --layernorm-epsilon 1e-5"   # --fp8-hybrid
DATA=(
    --data-path "$DATA_PATH"
    --data-impl mmap
    --renormalize-blend-weights
)
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS ${DATA[@]} --fp16 --hiden-size 3 --lr=1e-4
"""

MIGRATED = r"""#!/bin/bash
# an old one: --batch-size 1
DISTRIBUTED_ARGS="--nproc_per_node $GPUS --master_addr localhost"
GPT_ARGS="
    --num-layers 24 --tensor-model-parallel-size ${TP:-2} \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 
    --norm-epsilon 1e-5"   # --fp8-hybrid
DATA=(
    --data-path "$DATA_PATH"
    
    --renormalize-blend-weights
)
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS ${DATA[@]} --fp16 --hiden-size 3 --lr=1e-4
"""


def test_a_script_keeps_all_but_the_flags_that_changed(migrate, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    code, script, lines = migrate(str(path))
    assert script == MIGRATED and code == 2
    assert [line.partition(f"{path}:")[2].split(":")[:2] for line in lines.splitlines()] == [
        ["5", " --model-parallel-size ${TP"],
        ["6", " --DDP-impl local"],
        ["7", " --checkpoint-activations"],
        ["7", " --no-query-key-layer-scaling"],
        ["8", " --layernorm-epsilon 1e-5"],
        ["11", " --data-impl mmap"],
        ["14", " left as it is"],
        ["12", " --renormalize-blend-weights"],
    ]
    path.write_text(script.replace("--renormalize-blend-weights", ""))
    assert migrate(str(path))[:2] == (0, path.read_text())


def test_a_script_that_cannot_be_read_is_named(migrate, tmp_path):
    code, script, lines = migrate(str(tmp_path / "none.sh"))
    assert code == 2 and not script and lines.startswith(f"error: {tmp_path / 'none.sh'}: No such file")
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in migrate(str(tmp_path / "binary.sh"))[2]
