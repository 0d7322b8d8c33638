"""Things that are no regular files: opening or reading them blocks, never ends, or fails."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

SPECIAL_FILES = ("fifo", "socket", "endless device", "folder")


@contextlib.contextmanager
def special_file(path: Path, kind: str) -> Iterator[None]:
    """Makes such a thing at a path, and removes afterwards what is there."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as listener:  # its path must be short
            listener.bind(path.name)
    elif kind == "endless device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    yield
    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
