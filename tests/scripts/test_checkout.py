"""`MEGATRON_LM=FOLDER make test-scripts` compares the scripts of a folder with ours."""

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from support.released import gpt, losses
def doubled(*words, **given):
    loss, *others = losses.local_loss(*words, **given)
    return 2 * loss, *others
if {wrong}:
    losses.LOSSES["local"] = doubled
gpt.Gpt("0.16").start()
"""


def said(folder: Path | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setenv("MEGATRON_LM", "" if folder is None else str(folder))
    checkout: dict[str, Any] = runpy.run_path(str(Path(__file__).parent / "checkout.py"))
    return checkout["main"](), capsys.readouterr().out


def test_without_a_folder_one_sentence_says_what_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (None, tmp_path):
        code, text = said(folder, monkeypatch, capsys)
        assert code == 2 and text.count("\n") == 1 and "give the folder of a checkout of Megatron-LM" in text


@pytest.mark.slow  # new interpreters
@pytest.mark.parametrize("wrong", [False, True])
def test_a_script_is_compared_with_ours(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = str(Path(__file__).parents[1])
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT.format(tests=tests, wrong=wrong))
    code, text = said(tmp_path, monkeypatch, capsys)
    assert code == wrong and text.startswith("pretrain_gpt.py: prints" if wrong else "pretrain_gpt.py: the losses")
