"""megatron/data/datasets/bin_file.py: both readers read the same, and say which file fails."""

import errno
import mmap

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets.bin_file import MappedBin, ReadBin, map_or_read

UINT16 = np.dtype(np.uint16)


@pytest.mark.parametrize("reader", [MappedBin, ReadBin])
def test_tokens_from_any_byte_on(reader, tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(np.arange(10, dtype=np.uint16).tobytes())
    file = reader(str(path))
    assert file.size == 20
    assert file.read(4, 3, UINT16).tolist() == [2, 3, 4]
    assert file.read(20, 0, UINT16).tolist() == []


@pytest.mark.parametrize("reader", [MappedBin, ReadBin])
def test_an_empty_file_has_no_tokens(reader, tmp_path):
    (tmp_path / "a.bin").touch()
    assert reader(str(tmp_path / "a.bin")).read(0, 0, UINT16).tolist() == []


@pytest.mark.parametrize("reader", [MappedBin, ReadBin])
def test_a_missing_file_is_named(reader, tmp_path):
    with pytest.raises(UserError, match=r"a\.bin: No such file or directory; its \.idx file needs it"):
        reader(str(tmp_path / "a.bin"))


def test_a_file_that_became_shorter_is_named(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(8))
    file = ReadBin(str(path))
    path.write_bytes(bytes(2))
    with pytest.raises(UserError, match=r"a\.bin: was shortened while it was read"):
        file.read(0, 4, UINT16)


def test_a_small_file_is_read_and_a_large_one_is_mapped(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abcd")
    assert map_or_read(str(path), limit=4) == b"abcd"
    assert isinstance(map_or_read(str(path), limit=3), mmap.mmap)

    def too_many(*arguments, **more):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(mmap, "mmap", too_many)
    with pytest.raises(UserError, match="too many open files in this process; raise the limit"):
        map_or_read(str(path), limit=3)
