"""--version prints the versions that a report of a problem needs."""

import platform
import re

import pytest
import torch

from megatron.training.config.command_line import read_command_line
from megatron.training.config.version import version_text


def test_versions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as stop:
        read_command_line(["--lr", "x", "--version"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0 and printed.endswith(f"torch {torch.__version__}, Python {platform.python_version()}\n")
    assert re.match(r"\d+\.\d+\.\d+ (\(commit [0-9a-f]{12}\+?\))?", printed)
    monkeypatch.setenv("PATH", "")  # no git
    assert "commit" not in version_text()
