"""megatron/data/preparation/parquet.py: rows as lines of JSON; wrong columns and damage are named."""

import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron.core.exceptions import UserError
from megatron.data.preparation.inputs import find_inputs
from megatron.data.preparation.parquet import ParquetReader, count_row_groups


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


def test_without_the_package_it_is_named(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"--input .*x.parquet: a Parquet file, .*pip install pyarrow"):
        find_inputs([path])
