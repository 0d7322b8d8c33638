"""Files are whole or absent."""

import hashlib
from pathlib import Path

import pytest

from megatron.core.utils.files import open_atomically, sha256_of_file, write_atomically


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_appears_whole_when_it_is_closed(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / "state"
    write_atomically(path, "old", sync)
    with open_atomically(path, sync) as file:
        file.write("neü".encode())
        assert path.read_text() == "old"
    assert path.read_text("utf-8") == "neü" and list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_atomically(path, b"old")
    with pytest.raises(KeyboardInterrupt), open_atomically(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_of_two_writers_the_last_to_finish_wins_whole(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with open_atomically(path) as first:
        with open_atomically(path) as second:
            first.write(b"first")
            second.write(b"second, longer")
        assert path.read_bytes() == b"second, longer"
    assert path.read_bytes() == b"first"
    assert sha256_of_file(path) == hashlib.sha256(b"first").hexdigest()
