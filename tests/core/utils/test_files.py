"""Files are whole or absent."""

import hashlib
import math
from pathlib import Path

import pytest
from support.special_files import SPECIAL_FILES, special_file

from megatron.core.utils.files import (
    open_atomically,
    open_regular_file,
    parse_json,
    read_regular_file,
    sha256_of_file,
    write_atomically,
)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[1, NaN]", "NaN is not a number"),
        ("-Infinity", "is not a number"),
        ("{'a': 1}", "Expecting"),
        (b"\xff", "invalid start byte"),
        ("1" * 5000, "digits"),
    ],
)
def test_what_is_not_json_is_a_value_error(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_json() -> None:
    assert parse_json('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    assert math.isnan(parse_json("NaN", with_nan=True))


@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    with special_file(tmp_path / "x", kind), pytest.raises(OSError, match=r"it is a \w+, not a file"):
        open_regular_file(tmp_path / "x")


def test_a_regular_file_is_read_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_regular_file(tmp_path / "link") == b"content" and read_regular_file(tmp_path / "file", 3) == b"con"
    with pytest.raises(FileNotFoundError):
        read_regular_file(tmp_path / "none")
