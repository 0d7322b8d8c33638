"""megatron/data/preparation/arrow.py: rows of Arrow's stream and file formats; damage is named."""

import sys

import pyarrow
import pytest

from megatron.core.exceptions import UserError
from megatron.data.preparation.arrow import ArrowReader, count_batches, read_arrow_schema

TABLE = pyarrow.table({"text": ["a", "é" * 50, "c"], "n": [1, 2, 3]})


@pytest.fixture(params=[pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
def path(request, tmp_path):
    with request.param(str(tmp_path / "x.arrow"), TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=2)
    return str(tmp_path / "x.arrow")


def test_rows_are_lines_of_json(path):
    assert count_batches(path) == 2 and read_arrow_schema(path).names == ["text", "n"]
    with ArrowReader(path, ["text"], 60) as reader:
        assert list(reader.lines_of_group(0)) == [b'{"text": "a"}', None]
        assert list(reader.lines_of_group(1)) == [b'{"text": "c"}']
        assert reader.bytes_read > 0
    with ArrowReader(path, ["text"], 60, all_columns=True) as reader:
        assert list(reader.lines_of_group(1)) == [b'{"text": "c", "n": 3}']


def test_mistakes_are_named(path, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"no column 'x'; columns present: 'text', 'n'"):
        ArrowReader(path, ["x"], 60)
    (tmp_path / "y.arrow").write_bytes(b"no arrow file")
    with pytest.raises(UserError, match=r"y.arrow: damaged, or no Arrow file"):
        count_batches(str(tmp_path / "y.arrow"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install pyarrow"):
        count_batches(path)
