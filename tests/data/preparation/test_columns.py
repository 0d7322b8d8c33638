"""megatron/data/preparation/columns.py: rows of Parquet and of Arrow's stream and file formats as lines of JSON; wrong
columns and damage are named."""

import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron.core.exceptions import UserError
from megatron.data.preparation.columns import ArrowReader, ParquetReader, count_batches, count_row_groups, read_schema
from megatron.data.preparation.inputs import find_inputs

TABLE = pyarrow.table({"text": ["a", "é" * 50, "c"], "n": [1, 2, 3]})


@pytest.fixture(params=[pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
def arrow(request, tmp_path):
    with request.param(str(tmp_path / "x.arrow"), TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=2)
    return str(tmp_path / "x.arrow")


def test_rows_of_arrow_are_lines_of_json(arrow):
    assert count_batches(arrow) == 2 and read_schema(arrow, "arrow").names == ["text", "n"]
    with ArrowReader(arrow, ["text"], 60) as reader:
        assert list(reader.lines_of_group(0)) == [b'{"text": "a"}', None]
        assert list(reader.lines_of_group(1)) == [b'{"text": "c"}']
        assert reader.bytes_read > 0
    with ArrowReader(arrow, ["text"], 60, all_columns=True) as reader:
        assert list(reader.lines_of_group(1)) == [b'{"text": "c", "n": 3}']


def test_mistakes_are_named(arrow, tmp_path):
    with pytest.raises(UserError, match=r"no column 'x'; columns present: 'text', 'n'"):
        ArrowReader(arrow, ["x"], 60)
    (tmp_path / "y.arrow").write_bytes(b"no arrow file")
    with pytest.raises(UserError, match=r"y.arrow: damaged, or no Arrow file"):
        count_batches(str(tmp_path / "y.arrow"))


def test_without_the_package_it_is_named(arrow, path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name, kind in ((path, "a Parquet"), (arrow, "an Arrow")):
        with pytest.raises(UserError, match=rf"--input {name}: {kind} file, .*pip install pyarrow"):
            find_inputs([name])


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "x.parquet")
    columns = {"text": ["a", None, "é" * 50, "d"], "list": [["x"], [], ["y", "z"], None], "number": [1, 2, 3, 4]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    return path


def test_rows_are_lines_of_json(path):
    assert count_row_groups(path) == 2
    with ParquetReader(path, ["text"], 60) as reader:
        assert list(reader.lines_of_group(0)) == [b'{"text": "a"}', b'{"text": null}', None]
        assert reader.bytes_read > 0
        assert list(reader.lines_of_group(1)) == [b'{"text": "d"}']
    with ParquetReader(path, ["list"], 60) as reader:
        assert next(reader.lines_of_group(0)) == b'{"list": ["x"]}'


@pytest.mark.parametrize(
    ("key", "says"),
    [("txt", "no column 'txt'; columns present: 'text', 'list'"), ("number", "contains int64, not tex")],
)
def test_wrong_columns_are_named(path, key, says):
    with pytest.raises(UserError, match=rf"x.parquet: .*{says}"):
        ParquetReader(path, [key], 60)


@pytest.mark.parametrize("damage", ["cut", "page"])
def test_damage_is_named(path, damage):
    content = bytearray(Path(path).read_bytes())
    content[4:60] = b"\xff" * 56
    Path(path).write_bytes(content[:-20] if damage == "cut" else content)
    with pytest.raises(UserError, match=r"x.parquet: damaged, or no Parquet file: "):
        list(ParquetReader(path, ["text"], 60).lines_of_group(0))
