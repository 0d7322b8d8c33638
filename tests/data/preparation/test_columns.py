"""megatron/data/preparation/columns.py: `content` is read only where nothing else can be meant."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from megatron.data.preparation.columns import resolve_keys
from megatron.data.preparation.inputs import find_inputs


@pytest.mark.parametrize(
    ("record", "keys"),
    [
        ({"content": "x", "id": 3}, ["content"]),
        ({"content": "x", "url": "y"}, ["text"]),
        ({"content": "x", "text": None}, ["text"]),
        ({"body": "x"}, ["text"]),
    ],
)
def test_the_only_column_of_texts(tmp_path, record, keys):
    line = json.dumps(record).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(b"\n" + line)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(line))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        warnings: list[str] = []
        files = find_inputs([str(tmp_path / name)])
        assert resolve_keys(["text"], files, warnings.append) == keys
        assert len(warnings) == (keys == ["content"])
        assert resolve_keys(["body"], files, warnings.append) == ["body"]


@pytest.mark.parametrize("content", [b"", b"no json\n", b"[1]\n"])
def test_other_lines_are_left_to_their_reader(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert resolve_keys(["text"], find_inputs([str(tmp_path)]), print) == ["text"]
