"""megatron/data/datasets/index_format.py: bytes equal to golden files; headers that lie are refused."""

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets.index_format import MAGIC, DType, read_header, write_index


def test_bytes_of_a_small_index(tmp_path):
    path = tmp_path / "x.idx"
    write_index(path, np.uint16, np.array([3, 1, 2]), np.array([0, 2, 2, 3]))
    expected = (
        b"MMIDIDX\x00\x00"
        + np.array([1], "<u8").tobytes()
        + bytes([8])
        + np.array([3, 4], "<u8").tobytes()
        + np.array([3, 1, 2], "<i4").tobytes()
        + np.array([0, 6, 8], "<i8").tobytes()
        + np.array([0, 2, 2, 3], "<i8").tobytes()
    )
    assert path.read_bytes() == expected
    header = read_header(path)
    assert (header.dtype, header.num_sequences, header.num_document_indices) == (np.uint16, 3, 4)
    assert header.modes_offset == len(expected)


def test_pieces_write_what_one_array_writes(tmp_path):
    lengths = np.arange(1, 1000, dtype=np.int32)
    documents = np.arange(0, 1000, dtype=np.int64)
    write_index(tmp_path / "whole.idx", np.int32, lengths, documents, modes=np.zeros(999, np.int8))
    empty = np.empty(0, np.int32)
    write_index(
        tmp_path / "pieces.idx",
        np.int32,
        [lengths[:10], empty, lengths[10:]],
        [documents[:1], documents[1:]],
        modes=np.zeros(999, np.int8),
    )
    assert (tmp_path / "whole.idx").read_bytes() == (tmp_path / "pieces.idx").read_bytes()


def test_empty_index(tmp_path):
    write_index(tmp_path / "x.idx", np.int32, [], np.array([0]))
    assert read_header(tmp_path / "x.idx").num_sequences == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not an index"),
        (b"PK" + bytes(60), "not an index"),
        (MAGIC + (2).to_bytes(8, "little") + bytes(17), "version 2"),
        (MAGIC + (1).to_bytes(8, "little") + b"\x09" + bytes(16), "type code 9"),
        (MAGIC + (1).to_bytes(8, "little") + b"\x08" + (5).to_bytes(8, "little") + bytes(8), "too short"),
    ],
)
def test_bad_header_names_file_and_cause(tmp_path, content, says):
    path = tmp_path / "bad.idx"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says) as error:
        read_header(path)
    assert str(path) in str(error.value)


def test_missing_index_says_what_writes_it(tmp_path):
    with pytest.raises(UserError, match="preprocess_data"):
        read_header(tmp_path / "none.idx")


def test_optimal_dtype():
    assert DType.optimal_dtype(65499) is np.uint16
    assert DType.optimal_dtype(65500) is np.int32
    assert DType.optimal_dtype(None) is np.int32
    assert DType.size(8) == DType.size(np.uint16) == 2
