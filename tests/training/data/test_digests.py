"""Digests of the data are in checkpoints, and a resumed run says what differs."""

import json
from pathlib import Path

import pytest
from support.runs import train, write_documents

from megatron.training.data.digests import data_differences


def test_a_resumed_run_says_which_data_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = write_documents(tmp_path / "data", seed=1), tmp_path / "run"
    flags = f"--eval-iters 0 --train-iters 3 --save {run} --load {run} --save-interval 1 --data-path"
    train(f"{flags} {data} --exit-interval 1")
    manifest = json.loads((run / "iter_0000001/manifest.json").read_text())
    assert list(manifest["config"]["data"]) == [data]
    train(f"{flags} {data} --exit-interval 2")
    assert "its content" not in capsys.readouterr().out
    write_documents(tmp_path / "data", seed=2)
    train(f"{flags} {data}")
    assert f"data {data}: its content has changed since the checkpoint was saved" in capsys.readouterr().out


def test_made_up_data_has_no_digest(tmp_path: Path) -> None:
    train(f"--mock-data --eval-iters 0 --train-iters 1 --save {tmp_path}")
    assert "data" not in json.loads((tmp_path / "iter_0000001/manifest.json").read_text())["config"]


def test_moved_and_new_data() -> None:
    before = {"old/a": "1", "b": "2"}
    assert list(data_differences({"old/a": "1", "b": "2"}, before)) == []
    assert list(data_differences({"new/a": "1", "b": "3", "c": "4"}, before)) == [
        "data new/a: has the content of old/a when the checkpoint was saved",
        "data b: its content has changed since the checkpoint was saved",
        "data c: new content, which the run that saved the checkpoint did not have",
    ]
