"""Files in pieces: any sizes arrive as they were, and errors wait until the end."""

from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import file_pieces
from megatron.core.dist_checkpointing.disk import Disk
from megatron.core.dist_checkpointing.file_pieces import FileReceiver, FileSender
from megatron.core.exceptions import UserError

SIZES = {"a": 5, "b": 16, "c": 0, "d": 23}


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(file_pieces, "PIECE_BYTES", 8)
    for i, (name, size) in enumerate(SIZES.items()):
        (tmp_path / name).write_bytes(bytes((7 * i + j) % 251 for j in range(size)))
    return [tmp_path / name for name in SIZES if SIZES[name]]


def test_files_arrive_as_they_were(paths: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    sender, receiver = FileSender(paths), FileReceiver(Disk(), target, [(p.name, p.stat().st_size) for p in paths])
    while receiver.left:
        piece = sender.next()
        assert piece.numel() == min(8, receiver.left)
        receiver.take(piece)
    assert sender.next().numel() == 0
    sender.finish()
    receiver.finish()
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {p.name: p.read_bytes() for p in paths}


def test_a_file_that_becomes_shorter_is_named_at_the_end(paths: list[Path]) -> None:
    sender = FileSender(paths)
    paths[1].write_bytes(b"xy")
    assert [sender.next().numel() for _ in range(7)] == [8, 8, 8, 8, 8, 4, 0]
    with pytest.raises(UserError, match=r"b: the file has become .* bytes shorter"):
        sender.finish()


def test_a_write_that_fails_is_raised_at_the_end(paths: list[Path], tmp_path: Path) -> None:
    receiver = FileReceiver(Disk(), tmp_path / "missing", [("a", 5), ("b", 16)])
    sender = FileSender(paths)
    while receiver.left:
        receiver.take(sender.next()[: receiver.left])
    with pytest.raises(FileNotFoundError):
        receiver.finish()
