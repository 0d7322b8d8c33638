"""What a worker writes: documents framed as sequences with their EOD, appended to files of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from megatron.training.tokenizer.byte_level import EncodedTexts

LENGTHS = np.dtype("<i4")
"""Tokens of a sequence, and sequences of a document, as shards hold them."""


class StreamName(NamedTuple):
    """One of a worker's streams: the key's place in --json-keys, and the line's place modulo --partitions."""

    key: int
    part: int


@dataclass(frozen=True)
class StreamCounts:
    """What a stream holds, or one block's share of it."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    special_documents: int = 0
    """Documents whose text spells out a special token."""

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
        stem = f"worker{worker}.key{stream.key}.part{stream.part}"
        return cls(folder / f"{stem}.tokens", folder / f"{stem}.sequences", folder / f"{stem}.documents")


@dataclass(frozen=True)
class FramedDocuments:
    """Documents as they are stored: ids back to back, tokens of each sequence, sequences of each document."""

    ids: np.ndarray
    sequence_lengths: np.ndarray
    document_lengths: np.ndarray


def frame_documents(encoded: EncodedTexts, texts_of_document: np.ndarray, eod: int | None) -> FramedDocuments:
    """Drop texts without tokens; end the last sequence of each document that has any with `eod`, if it is given.

    `texts_of_document` is the number of texts of each document; a document may have none, and stays a document.
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
    """Appends documents to a stream's files, and counts those of the current block. A context manager."""

    def __init__(self, paths: ShardPaths, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._files: list[BinaryIO] = [
            open(path, "wb")  # noqa: SIM115
            for path in (paths.tokens, paths.sequence_lengths, paths.document_lengths)
        ]
        self._counts = StreamCounts()
        self._before_block = StreamCounts()

    @property
    def counts(self) -> StreamCounts:
        """All that was appended."""
        return self._counts

    def __enter__(self) -> "StreamWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    def append(self, framed: FramedDocuments, special_documents: int) -> None:
        tokens, sequence_lengths, document_lengths = self._files
        tokens.write(framed.ids.astype(self._dtype, copy=False).data)
        sequence_lengths.write(framed.sequence_lengths.astype(LENGTHS).data)
        document_lengths.write(framed.document_lengths.astype(LENGTHS).data)
        self._counts += StreamCounts(
            framed.document_lengths.size, framed.sequence_lengths.size, framed.ids.size, special_documents
        )

    def end_block(self) -> StreamCounts:
        """Hand what was appended to the operating system, and tell how much it was since the last block."""
        for file in self._files:
            file.flush()
        since = self._counts - self._before_block
        self._before_block = self._counts
        return since
