"""Batches of documents. A tokenizer encodes a batch at once, which is much faster for short documents."""

import numpy as np

from megatron.core.exceptions import UserError
from megatron.data.preparation.messages import Job, LineFault
from megatron.data.preparation.shards import StreamName, StreamWriter, frame_documents


class DocumentBatch:
    """Documents of one part of the input that will be encoded together."""

    def __init__(self, part: int, job: Job, writers: dict[StreamName, StreamWriter]) -> None:
        self._job = job
        self._writers = [writers[StreamName(key, part)] for key in range(len(job.keys))]
        self._lines: list[int] = []
        self._documents: list[list[list[str]]] = []  # [document][key] -> texts
        self.bytes = 0

    def add(self, line: int, texts: list[list[str]], size: int) -> None:
        """Adds the document of a line: its texts by key, and the bytes of the line."""
        self._lines.append(line)
        self._documents.append(texts)
        self.bytes += size

    def flush(self) -> list[LineFault]:
        """Encodes and writes the documents. Returns the lines that the tokenizer cannot encode."""
        if not self._documents:
            return []
        faults: list[LineFault] = []
        try:
            self._write()
        except UserError:
            faults = self._remove_unencodable()
            self._write()
        self._lines, self._documents, self.bytes = [], [], 0
        return faults

    def _write(self) -> None:
        """Encodes all keys before writing, so that an error does not change the files."""
        tokenizer = self._job.tokenizer
        framed = []
        for key in range(len(self._writers)):
            texts = [text for document in self._documents for text in document[key]]
            counts = np.array([len(document[key]) for document in self._documents], np.int64)
            special = 0
            if tokenizer.holds_special_literal("\n".join(texts)):
                special = sum(any(map(tokenizer.holds_special_literal, document[key])) for document in self._documents)
            framed.append((frame_documents(tokenizer.encode_texts(texts), counts, self._job.eod), special))
        for writer, (documents, special) in zip(self._writers, framed, strict=True):
            writer.append(documents, special)

    def _remove_unencodable(self) -> list[LineFault]:
        faults = []
        kept = []
        for line, document in zip(self._lines, self._documents, strict=True):
            try:
                for text in (text for texts in document for text in texts):
                    self._job.tokenizer.tokenize(text)
                kept.append(document)
            except UserError as error:
                faults.append(LineFault(line, "not encodable", str(error)))
        self._documents = kept
        return faults
