"""megatron/data/cleaning/rows.py: rows of blocks of any size are the rows of the file."""

import gzip
from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.data.cleaning.rows import count_lines, divide, read_rows, source_of, write_plain_lines
from megatron.data.preparation.inputs import find_inputs

LINES = b'{"text": "a"}\n\n{"text": ["b", "c"]}\n  \n{"text": "d", "n": 1}'


@pytest.mark.parametrize("size", [1, 7, 14, 15, 1000])
def test_blocks_cover_each_row_once(tmp_path, size):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    sources = [source_of(file, tmp_path) for file in find_inputs([str(tmp_path / "a*"), str(tmp_path / "b*")])]
    for source in sources:
        write_plain_lines(source, "text")
    assert [source.path == source.file.path for source in sources] == [True, False]
    assert [source.output_name for source in sources] == ["00000-a.jsonl", "00001-b.jsonl"]
    blocks = divide(sources, size)
    assert [block.number for block in blocks] == list(range(len(blocks)))
    rows = [row for block in blocks for row in read_rows(block, "text", skip_bad=False)]
    assert [row.text for row in rows] == ["a", "b\nc", "d"] * 2
    assert sum(map(count_lines, blocks)) == 10
    content = Path(sources[1].path).read_bytes()
    assert all(content[row.offset :].startswith(row.line) for row in rows[3:])


def test_bad_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES + b"\nx\n")
    (block,) = divide([source_of(file, tmp_path) for file in find_inputs([str(tmp_path)])])
    with pytest.raises(UserError, match=r"a.jsonl:6: not JSON.*--on-error skip"):
        list(read_rows(block, "text", skip_bad=False))
    fault = list(read_rows(block, "text", skip_bad=True))[-1].fault
    assert fault is not None and fault.fault == "not JSON"
