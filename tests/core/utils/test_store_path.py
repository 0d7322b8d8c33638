"""Paths of objects: their names, what they hold, and what is told when a store does not answer."""

import pickle
from pathlib import Path

import pytest
from support.stores import faults, store_in

from megatron.core.exceptions import UserError
from megatron.core.utils import store_path
from megatron.core.utils.files import open_regular_file, read_regular_file
from megatron.core.utils.store_path import StorePath, local_folder, place
from megatron.core.utils.stores import StoreError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store/run/a").mkdir(parents=True)
    (tmp_path / "store/run/a/b.txt").write_bytes(b"0123456789")
    return place(store_in(tmp_path))


def test_names() -> None:
    path = place("s3://bucket/run/") / "iter_0000010"
    assert isinstance(path, StorePath) and str(path) == "s3://bucket/run/iter_0000010"
    assert path.parent == place("s3://bucket/run") and path.with_name("b").name == "b"
    assert str(path.absolute()) == str(path.resolve()) == str(place(path)) == str(path)
    again = pickle.loads(pickle.dumps(path))
    assert isinstance(again, StorePath) and again == path and hash(again) == hash(path)
    assert str(place("file:///tmp/x") / "y") == "file:///tmp/x/y"
    assert type(place("s3/bucket")) is type(Path())
    with pytest.raises(UserError, match="--save s3://bucket: this tool writes a folder on disk"):
        local_folder("--save", "s3://bucket")


def test_contents(root: Path) -> None:
    file = root / "a/b.txt"
    assert root.is_dir() and file.is_file() and not (root / "c").exists()
    assert [*root.iterdir()] == [root / "a"] and [*root.glob("*/*.txt")] == [file]
    assert file.stat().st_size == 10 and file.stat().st_mtime_ns > 1e18
    assert read_regular_file(file) == b"0123456789" and read_regular_file(file, 4) == b"0123"
    with open_regular_file(file) as opened:
        opened.seek(7)
        assert opened.read(9) == b"789" and opened.read(1) == b""
    with pytest.raises(OSError, match="not opened as a file"):
        file.open()
    file.unlink()
    file.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        file.read_bytes()


def test_a_request_is_tried_again_unless_it_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tries = StorePath(root), []
    monkeypatch.setattr(store_path, "_PAUSE", 0.0)

    def answer(store: object, url: str) -> int:
        tries.append(url)
        if len(tries) < 3:
            raise TimeoutError("no answer")
        return 7

    assert path.ask(answer) == 7 and tries == [str(root)] * 3

    def fails(store: object, url: str) -> int:
        tries.append(url)
        raise TimeoutError("no answer to key:secret@host, https://key:secret@host/")

    with pytest.raises(
        StoreError, match=r"run: the store does not answer as expected \(TimeoutError: .*https://\*\*\*@"
    ):
        path.ask(fails)
    assert len(tries) == 6
    with faults(str(root), expired=True), pytest.raises(StoreError, match="refuses access"):
        path.exists()
