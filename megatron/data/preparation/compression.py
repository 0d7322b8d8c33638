"""Opens input files as plain bytes: uncompressed, gzip (.gz), xz (.xz) or Zstandard (.zst, with the package
zstandard)."""

import gzip
import io
import lzma
import zlib
from typing import Any, Literal

from megatron.core.exceptions import UserError
from megatron.data.datasets.object_store import is_url, open_object

Kind = Literal["plain", "gzip", "xz", "zstd", "parquet", "arrow", "text"]
"""How an input file is stored."""

DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)
"""Exceptions that reading a damaged compressed file raises."""

CHECKS = {"gzip": "gzip -t", "xz": "xz -t", "zstd": "zstd -t"}
"""Commands that describe the damage of a file."""

_MAGIC: dict[bytes, Kind] = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
}
_REFUSED = {b"BZh": "bzip2", b"PK\x03\x04": "zip"}
_BUFFER = 1 << 20


def kind_of(path: str, start: bytes) -> Kind:
    """Returns how a file is stored, by its first bytes. Raises UserError for other archives."""
    for magic, name in _REFUSED.items():
        if start.startswith(magic):
            raise UserError(
                f"--input {path}: compressed with {name}; what works is plain text, gzip, xz, zstd, Parquet, Arrow"
            )
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "plain")


def open_raw(path: str) -> Any:
    """Opens a local file, or an object in a store, for reading its bytes as they are, without a buffer."""
    return open_object(path) if is_url(path) else open(path, "rb", buffering=0)


def open_plain(raw: Any, path: str, kind: Kind) -> io.BufferedReader:
    """Returns a buffered stream of the file's uncompressed bytes. It closes `raw` when it is closed."""
    stream: Any = raw
    if kind == "gzip":
        stream = gzip.GzipFile(fileobj=raw)
    elif kind == "xz":
        stream = lzma.LZMAFile(raw)  # noqa: SIM115
    elif kind == "zstd":
        stream = _ZstdStream(raw, path)
    return io.BufferedReader(stream, _BUFFER)


class _ZstdStream(io.RawIOBase):
    """Decompresses the frames of a file one after the other. Raises EOFError if the file is cut off or damaged."""

    def __init__(self, raw: Any, path: str) -> None:
        super().__init__()
        self._raw = raw
        self._zstandard = _load_zstandard(path)
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._input:
                self._input = self._raw.read(_BUFFER)
                if not self._input:
                    if self._frame is not None:
                        raise EOFError("the file ends inside a frame")
                    return 0
            self._output = memoryview(self._decompress())
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _decompress(self) -> bytes:
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        try:
            output: bytes = self._frame.decompress(self._input)
        except self._zstandard.ZstdError as error:
            raise EOFError(str(error)) from None
        self._input = b""
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None
        return output


def _load_zstandard(path: str) -> Any:
    try:
        import zstandard
    except ImportError:
        raise UserError(f"--input {path}: compressed with zstd, which needs a package: pip install zstandard") from None
    return zstandard
