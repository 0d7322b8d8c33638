"""An object store for tests: a directory that all processes share, with faults on demand.

`teststore://tmp/of/test/store/run` is in the directory /tmp/of/test/store. Objects appear whole, when an upload ends.
Folders exist as long as they hold an object. All processes see the same objects and the same faults.
"""

import datetime
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class ExpiredToken(Exception):
    """What a store's package may raise: an error of its own."""


class DirectoryStore(AbstractFileSystem):
    """The store. Its faults are in a file beside the directory (`faults`)."""

    protocol = "teststore"
    cachable = False

    def _local(self, path: str) -> Path:
        return Path("/", self._strip_protocol(path).strip("/"))

    def check(self, path: str) -> dict[str, Any]:
        """Returns the faults of now. Raises the error of a store that refuses access, if that is one."""
        file = _faults_file(self._strip_protocol(path))
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        if found.get("expired"):
            raise ExpiredToken("The provided token has expired")
        return found

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.check(path)
        local = self._local(path)
        if local.is_dir() and not any(local.rglob("*.*")):
            raise FileNotFoundError(path)
        kind = "directory" if local.is_dir() else "file"
        return {"name": self._strip_protocol(path), "type": kind, "size": local.stat().st_size}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        hidden = self.check(path).get("unlisted", [])
        base = self._strip_protocol(path).rstrip("/")
        if not self._local(path).is_dir():
            raise FileNotFoundError(path)
        found = [f"{base}/{each.name}" for each in sorted(self._local(path).iterdir()) if each.name not in hidden]
        return [self.info(name) for name in found] if detail else found

    def modified(self, path: str) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._local(path).stat().st_mtime, tz=datetime.UTC)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.check(path)
        return self._local(path).read_bytes()[start:end]

    def rm_file(self, path: str) -> None:
        self.check(path)
        self._local(path).unlink()

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        for each in [*self._local(path).rglob("*.*")]:
            self.rm_file(f"{path}/{each.relative_to(self._local(path))}")

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: Any) -> AbstractBufferedFile:
        assert mode == "wb"
        return _Upload(self, path, mode, block_size=block_size or 1 << 20)


class _Upload(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        faults = self.fs.check(self.path)
        if str(faults.get("broken_link")) in self.path:
            raise ConnectionResetError("Connection reset by peer")
        self.parts.append(self.buffer.getvalue())
        if final:
            content = b"".join(self.parts)
            local = self.fs._local(self.path)
            local.parent.mkdir(parents=True, exist_ok=True)
            aside = local.parent / str(os.getpid())
            is_cut = str(faults.get("cut")) in self.path
            aside.write_bytes(content[: len(content) // 2] if is_cut else content)
            os.replace(aside, local)
        return True

    def discard(self) -> None:
        self.parts = []


def store_in(folder: Path) -> str:
    """Returns the URL of a run in a new store in this folder."""
    return f"teststore:/{folder}/store/run"


def _faults_file(path: str) -> Path:
    return Path("/", path.strip("/").partition("/store/")[0], "faults.json")


@contextmanager
def faults(url: str, **faults: object) -> Iterator[None]:
    """The store of a URL has these faults meanwhile: expired, unlisted (names), and broken_link and cut (a part of the
    object's name)."""
    file = _faults_file(url.partition("://")[2])
    file.write_text(json.dumps(faults))
    try:
        yield
    finally:
        file.unlink()


fsspec.register_implementation("teststore", DirectoryStore, clobber=True)
