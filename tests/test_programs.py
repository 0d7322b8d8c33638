"""megatron/programs.py: which command a program's name stands for."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import python

from megatron.programs import FAMILIES, command_of, entry_script, overview, tools

ROOT = Path(__file__).parents[1]


def test_a_run_is_one_process_or_under_torchrun() -> None:
    script = str(ROOT / "pretrain_t5.py")
    assert command_of(["pretrain", "t5", "--lr", "1"]) == [sys.executable, script, "--lr", "1"]
    launched = command_of(["pretrain", "--nproc_per_node", "2", "t5", "--lr", "gpt"])
    assert launched[1:] == ["-m", "torch.distributed.run", "--nproc_per_node", "2", script, "--lr", "gpt"]
    assert all(entry_script(family).is_file() for family in FAMILIES)


def test_a_tool_is_found_by_its_name() -> None:
    plan = [sys.executable, str(ROOT / "tools/plan.py"), "--params", "7B"]
    assert command_of(["plan", "--params", "7B"]) == plan
    assert command_of(["preprocess"]) == command_of(["preprocess-data"]) == command_of(["preprocess_data"])
    assert command_of(["convert"])[1] == str(ROOT / "tools/checkpoint/convert.py")
    assert len(tools()) > 25 and "entry_scripts" not in tools()


def test_names_that_are_no_program() -> None:
    with pytest.raises(ValueError, match=r"pretrian: no such program; there are pretrain, preprocess, convert, "):
        command_of(["pretrian", "gpt"])
    with pytest.raises(ValueError, match=r"give the model family, one of gpt, bert, t5, hybrid, mamba, before the"):
        command_of(["pretrain", "--num-layers", "2"])


def test_the_overview_has_a_line_for_each_program() -> None:
    lines = overview().splitlines()[2:]
    assert len(lines) == len(FAMILIES) + len(tools()) and all(len(line.split()) > 2 for line in lines)


def test_the_module_becomes_the_program(tmp_path: Path) -> None:
    command = [python(), "-m", "megatron", "recipes", "list", "zzz"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and done.stderr.startswith("error: zzz: no recipe has this word")
    done = subprocess.run([*command[:3], "no"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and done.stderr.startswith("error: no: no such program")
