"""megatron/data/datasets/bin_file.py: reads tokens, and says which file fails."""

import errno
import mmap
import os
import resource
from collections.abc import Iterator

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets import bin_file
from megatron.data.datasets.bin_file import ReadBin, map_or_read, most_open_files

UINT16 = np.dtype(np.uint16)


def test_tokens_from_any_byte_on(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(np.arange(10, dtype=np.uint16).tobytes())
    file = ReadBin(str(path))
    assert file.size == 20
    assert file.read(4, 3, UINT16).tolist() == [2, 3, 4]
    assert file.read(20, 0, UINT16).tolist() == []


def test_an_empty_file_has_no_tokens(tmp_path):
    (tmp_path / "a.bin").touch()
    assert ReadBin(str(tmp_path / "a.bin")).read(0, 0, UINT16).tolist() == []


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"a\.bin: No such file or directory; its \.idx file needs it"):
        ReadBin(str(tmp_path / "a.bin"))


def test_a_file_that_became_shorter_is_named(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(8))
    file = ReadBin(str(path))
    path.write_bytes(bytes(2))
    with pytest.raises(UserError, match=r"a\.bin: was shortened while it was read: 2 bytes, before 8"):
        file.read(0, 4, UINT16)


def test_a_small_file_is_read_and_a_large_one_is_mapped(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abcd")
    assert map_or_read(str(path), limit=4) == b"abcd"
    assert isinstance(map_or_read(str(path), limit=3), mmap.mmap)

    def too_many(*arguments, **more):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(mmap, "mmap", too_many)
    with pytest.raises(
        UserError, match=r"too many open files in this process: \d+ are allowed \(ulimit -n\), up to \d+ without"
    ):
        map_or_read(str(path), limit=3)


@pytest.fixture
def few_open_files() -> Iterator[int]:
    """The process may open ten more files than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    bin_file._open_files.cache_clear()
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, hard))
    yield used + 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    bin_file._open_files.cache_clear()


def test_more_files_than_the_process_may_open(tmp_path, few_open_files):
    """Files that were not read lately are closed."""
    assert most_open_files() == few_open_files // 2
    readers = []
    for number in range(few_open_files + 20):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(number.to_bytes(2, "little"))
        readers.append(ReadBin(str(path)))
    for _ in range(2):
        assert [int(reader.read(0, 1, UINT16)[0]) for reader in readers] == list(range(few_open_files + 20))


@pytest.mark.parametrize("device", ["pipe", "/dev/zero"])
def test_pipes_and_devices_are_refused(tmp_path, device):
    path = tmp_path / "a.bin"
    os.mkfifo(path) if device == "pipe" else path.symlink_to(device)
    with pytest.raises(UserError, match=r"a\.bin: it is a (FIFO|device|pipe), not a file; copy the data"):
        ReadBin(str(path))
