"""tools/recipes.py: what it prints, and its exit codes."""

from pathlib import Path

import pytest
from support.command_lines import configured

from tools.recipes import main


def test_list_finds_by_name_and_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "nemo"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"mistral-nemo-12b", "nemotron-h-8b", "nemotron3-nano-30b-a3b"} <= set(names)
    assert main(["list", "zzz"]) == 2
    assert capsys.readouterr().err == "error: zzz: no recipe has this word; python tools/recipes.py list lists all\n"


def test_show_is_a_config_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["show", "llama3-8b"]) == 0
    (tmp_path / "llama.yaml").write_text(capsys.readouterr().out)
    run = "--micro-batch-size 1 --train-iters 10 --mock-data"
    shown = configured(
        f"--config {tmp_path / 'llama.yaml'} --tokenizer-type NullTokenizer --vocab-size 128255", base=run
    )
    assert shown.transformer == configured("--recipe llama3-8b", base=run).transformer


def test_verify_counts_and_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "gpt2-124m"]) == 0
    out = capsys.readouterr().out
    assert "124,439,808 parameters, counted before 124,439,808 (+0.000%); a tiny one trains: losses " in out
    assert out.endswith("1 recipes, 0 failed\n")


def test_an_unknown_name_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpt2"]) == 2
    assert capsys.readouterr().err.startswith("error: gpt2: no such recipe; did you mean gpt2-")
