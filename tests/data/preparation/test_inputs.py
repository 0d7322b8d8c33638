"""megatron/data/preparation/inputs.py: files, patterns and folders, in an order that does not change."""

import gzip

import pytest

from megatron.core.exceptions import UserError
from megatron.data.preparation.inputs import find_inputs


def test_folders_give_their_text_files_in_order(tmp_path):
    for name in ("b.jsonl", "a.json.gz", "sub/c.JSONL", "notes.md", ".hidden.jsonl", ".git/d.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(b"{}") if name.endswith("gz") else b"{}")
    warnings: list[str] = []
    found = find_inputs([str(tmp_path)], warnings.append)
    assert [(file.index, file.path.removeprefix(f"{tmp_path}/")) for file in found] == [
        (0, "a.json.gz"),
        (1, "b.jsonl"),
        (2, "sub/c.JSONL"),
    ]
    assert [file.compressed for file in found] == [True, False, False]
    assert warnings == [f"--input {tmp_path}: 1 files with other endings are not read, such as {tmp_path}/notes.md"]


def test_a_file_that_is_read_twice_is_told(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{}")
    warnings: list[str] = []
    assert len(find_inputs([str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl")], warnings.append)) == 2
    assert warnings == [f"--input: {tmp_path}/a.jsonl is read more than once"]


def test_errors_name_the_input(tmp_path):
    with pytest.raises(UserError, match=r"--input none.jsonl: no such file"):
        find_inputs(["none.jsonl"])
    with pytest.raises(UserError, match=r"--input .*: a folder without input files, whose names end in .jsonl, "):
        find_inputs([str(tmp_path)])
    with pytest.raises(UserError, match=r"--input /dev/null: not a file that can be read in parts"):
        find_inputs(["/dev/null"])
