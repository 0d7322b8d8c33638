"""--version prints the versions that a report of a problem needs."""

import platform
import re
import tomllib
from pathlib import Path

import pytest
import torch

from megatron.training.config import version
from megatron.training.config.command_line import read_command_line
from megatron.training.config.version import version_text

ROOT = Path(__file__).parents[3]


def test_versions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as stop:
        read_command_line(["--lr", "x", "--version"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0 and printed.endswith(f"torch {torch.__version__}, Python {platform.python_version()}\n")
    assert re.match(r"\d+\.\d+\.\d+ (\(commit [0-9a-f]{12}\+?\))?", printed)
    monkeypatch.setenv("PATH", "")  # no git
    assert "commit" not in version_text()


def test_the_commit_that_a_wheel_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/commit.txt").write_text("0123456789ab+\n")
    monkeypatch.setattr(version, "_ROOT", tmp_path)
    assert re.match(r"\d+\.\d+\.\d+ \(commit 0123456789ab\+\), names of", version_text())


def test_the_changelog_begins_with_this_version() -> None:
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    heading = re.search(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert heading is not None and re.fullmatch(rf"{re.escape(number)}, (unreleased|\d{{4}}-\d\d-\d\d)", heading[1])
