"""Shards: the files to which a worker appends encoded documents."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from megatron.data.tokenizer.base import EncodedTexts

LENGTHS = np.dtype("<i4")
"""Type of sequence lengths and document lengths in shards."""


Checksums = tuple[int, int, int]
"""CRC-32 of bytes of a stream's three files: tokens, sequence lengths, document lengths."""


class StreamName(NamedTuple):
    """A stream of a worker: the index of the key in --json-keys, and the line number modulo --partitions."""

    key: int
    part: int


@dataclass(frozen=True)
class StreamCounts:
    """Numbers of documents and tokens in a stream, or in one block's part of it."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    special_documents: int = 0
    """Documents whose text contains the spelling of a special token."""

    def __add__(self, other: "StreamCounts") -> "StreamCounts":
        return StreamCounts(*(mine + yours for mine, yours in zip(self, other, strict=True)))

    def __sub__(self, other: "StreamCounts") -> "StreamCounts":
        return StreamCounts(*(mine - yours for mine, yours in zip(self, other, strict=True)))

    def __iter__(self) -> Iterator[int]:
        return iter((self.documents, self.sequences, self.tokens, self.special_documents))


@dataclass(frozen=True)
class ShardPaths:
    """The three files of a stream."""

    tokens: Path
    sequence_lengths: Path
    document_lengths: Path

    @classmethod
    def of(cls, folder: Path, worker: int, stream: StreamName) -> "ShardPaths":
        """Returns the paths of one worker and one stream."""
        stem = f"worker{worker}.key{stream.key}.part{stream.part}"
        return cls(folder / f"{stem}.tokens", folder / f"{stem}.sequences", folder / f"{stem}.documents")


@dataclass(frozen=True)
class FramedDocuments:
    """Encoded documents: all ids end to end, the tokens of each sequence, and the sequences of each document."""

    ids: np.ndarray
    sequence_lengths: np.ndarray
    document_lengths: np.ndarray


def frame_documents(encoded: EncodedTexts, texts_of_document: np.ndarray, eod: int | None) -> FramedDocuments:
    """Returns the documents without empty texts. Appends `eod`, if given, to the last sequence of each document.

    `texts_of_document` is the number of texts of each document. Documents without tokens are kept and get no `eod`.
    """
    kept = encoded.lengths > 0
    document_of_text = np.repeat(np.arange(texts_of_document.size), texts_of_document)[kept]
    sequence_lengths = encoded.lengths[kept]
    document_lengths = np.bincount(document_of_text, minlength=texts_of_document.size)
    ids = encoded.ids
    if eod is not None and sequence_lengths.size:
        last_of_document = np.cumsum(document_lengths)[document_lengths > 0] - 1
        ids = np.insert(ids, np.cumsum(sequence_lengths)[last_of_document], eod)
        sequence_lengths[last_of_document] += 1
    return FramedDocuments(ids, sequence_lengths, document_lengths)


class StreamWriter:
    """Appends documents to the files of a stream, and counts those of the current block. A context manager."""

    def __init__(self, paths: ShardPaths, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._files: list[BinaryIO] = [
            open(path, "wb")  # noqa: SIM115
            for path in (paths.tokens, paths.sequence_lengths, paths.document_lengths)
        ]
        self._counts = StreamCounts()
        self._before_block = StreamCounts()
        self._checksums = [0, 0, 0]

    @property
    def counts(self) -> StreamCounts:
        """Everything appended so far."""
        return self._counts

    def __enter__(self) -> "StreamWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def append(self, framed: FramedDocuments, special_documents: int) -> None:
        """Appends documents, of which `special_documents` contain the spelling of a special token."""
        arrays = (
            framed.ids.astype(self._dtype, copy=False),
            framed.sequence_lengths.astype(LENGTHS),
            framed.document_lengths.astype(LENGTHS),
        )
        for index, (file, array) in enumerate(zip(self._files, arrays, strict=True)):
            content = np.ascontiguousarray(array).data
            file.write(content)
            self._checksums[index] = zlib.crc32(content, self._checksums[index])
        self._counts += StreamCounts(
            framed.document_lengths.size, framed.sequence_lengths.size, framed.ids.size, special_documents
        )

    def end_block(self) -> tuple[StreamCounts, Checksums]:
        """Flushes the files. Returns counts and checksums of what was appended since the last call."""
        for file in self._files:
            file.flush()
        since = self._counts - self._before_block
        self._before_block = self._counts
        tokens, sequences, documents = self._checksums
        self._checksums = [0, 0, 0]
        return since, (tokens, sequences, documents)
