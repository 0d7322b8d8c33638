"""Reads text files (.txt, .md): a file is a document, or a separator divides it into several. Each document becomes a
line of JSON, as .jsonl files have them."""

import io
import json
from collections.abc import Iterator, Sequence

from megatron.core.exceptions import UserError
from megatron.data.preparation.compression import open_raw

ENDINGS = (".txt", ".md")
_CHUNK = 1 << 20


class TextReader:
    """Reads the documents of a text file as lines of JSON with the text under each of `keys`. A context manager.

    Raises UserError, naming the file, if it is not UTF-8.
    """

    def __init__(self, path: str, keys: Sequence[str], longest: int, separator: str | None = None) -> None:
        self._path, self._keys, self._longest = path, keys, longest
        self._separator = separator.encode() if separator else None
        self._file = io.BufferedReader(open_raw(path))
        self.bytes_read = 0

    def __enter__(self) -> "TextReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def lines_of_group(self, group: int) -> Iterator[bytes | None]:
        """Yields the documents of the file, which is one group; None for one that is longer than `longest` bytes."""
        for number, document in enumerate(self._documents(), 1):
            if document is None:
                yield None
                continue
            try:
                text = document.decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{self._path}: not UTF-8: byte 0x{document[error.start]:02x} of document {number}"
                ) from None
            if text.strip():
                yield json.dumps(dict.fromkeys(self._keys, text), ensure_ascii=False).encode()

    def _documents(self) -> Iterator[bytes | None]:
        held, too_long = b"", False
        while chunk := self._file.read(_CHUNK):
            self.bytes_read += len(chunk)
            held += chunk
            if self._separator is not None and self._separator in held:
                *whole, held = held.split(self._separator)
                for document in whole:
                    yield None if too_long or len(document) > self._longest else document
                    too_long = False
            if len(held) > self._longest + len(self._separator or b""):  # the end may be a part of a separator
                too_long = True
                held = held[-len(self._separator or b"x") :]  # may begin the next separator
        yield None if too_long or len(held) > self._longest else held
