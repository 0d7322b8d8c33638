"""YAML files: values, and sentences that name flag, file and line."""

from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.core.utils.yaml_files import read_yaml


def test_values_are_numbers_or_text_as_written(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("lr: [1.0e-3, yes]")
    assert read_yaml(path) == {"lr": [0.001, True]}
    assert read_yaml(path, as_text=True) == {"lr": ["1.0e-3", "yes"]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"tp: {}\ndp: 8\ntp: {}", ":3: tp is in line 1 too; give one"),
        (b"- {dp: {a: 8, a: 9}}", ":1: a is in line 1 too; give one"),
        (b"tp: {}\ndp: [", ":2: neither YAML nor JSON: "),
        (b"\xff\xfe", ": not UTF-8"),
        (b"dp: " + b"[" * 3000 + b"]" * 3000, ": values are nested too deeply"),
        (None, ": No such file or directory"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "a.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as failure:
        read_yaml(path, "--flag")
    assert str(failure.value).startswith(f"--flag {path}{complaint}")
