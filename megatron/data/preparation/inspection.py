"""Verifies a whole data set, and decodes documents of it."""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.core.exceptions import UserError
from megatron.data.datasets.conversations import ConversationFile, parse_conversation
from megatron.data.datasets.indexed_dataset import IndexedDataset
from megatron.data.preparation.checks import check_file, check_manifest, check_token_ids
from megatron.data.preparation.manifest import DataManifest, get_manifest_path, read_manifest
from megatron.data.tokenizer.base import Tokenizer
from megatron.data.tokenizer.sft import SFTTokenizer

_WHOLE = 1 << 62


def find_faults(path_prefix: str, tokenizer: Tokenizer | None = None) -> Iterator[str]:
    """Yields each fault of a data set, with the file's name. Reads all bytes.

    Checks the index, the sizes, the content against the manifest, the ids against the vocabulary (that of
    the tokenizer, or that of the manifest), and the tokenizer against that of the manifest.
    """
    dataset = manifest = None
    try:
        dataset = IndexedDataset(path_prefix)
    except (UserError, OSError) as error:
        yield str(error)
    try:
        manifest = read_manifest(path_prefix)
    except UserError as error:
        yield str(error)
    if manifest is not None:
        yield from _faults_of_files(path_prefix, manifest)
    if manifest is not None and dataset is not None:
        yield from _faults_of_counts(path_prefix, manifest, dataset)
    if manifest is not None and tokenizer is not None:
        try:
            check_manifest(path_prefix, tokenizer, tokenizer.vocab_size, lambda _: None, files=False)
        except UserError as error:
            yield str(error)
    known = tokenizer.vocab_size if tokenizer is not None else None
    known = known or (manifest.tokenizer.vocab_size if manifest is not None else None)
    if known is not None and dataset is not None:
        try:
            check_token_ids(path_prefix, known)
        except UserError as error:
            yield str(error)


def _faults_of_files(path_prefix: str, manifest: DataManifest) -> Iterator[str]:
    for suffix, record in manifest.files.items():
        path = Path(f"{path_prefix}.{suffix}")
        try:
            check_file(path, record.bytes, record.sha256, get_manifest_path(path_prefix), _WHOLE)
        except UserError as error:
            yield str(error)


def _faults_of_counts(path_prefix: str, manifest: DataManifest, dataset: IndexedDataset) -> Iterator[str]:
    found = {
        "documents": len(dataset.document_indices) - 1,
        "sequences": len(dataset),
        "tokens": int(dataset.sequence_lengths.sum(dtype=np.int64)),
        "dtype": dataset.dtype.name,
    }
    for name, value in found.items():
        expected = getattr(manifest, name)
        if value != expected:
            yield f"{path_prefix}.idx: {name} {value}, but {get_manifest_path(path_prefix)} says {expected}"


@dataclass(frozen=True)
class InspectedConversation:
    """A row of a file of conversations."""

    place: str
    tokens: int = 0
    learned: int = 0
    """Number of tokens that a run learns."""
    parts: tuple[tuple[str, bool], ...] = ()
    """The text in order, cut where learning begins and ends, and whether a part is learned."""
    fault: str | None = None


def inspected_conversations(path: str, tokenizer: SFTTokenizer, longest: int) -> Iterator[InspectedConversation]:
    """Yields the conversations of a file, with the text of up to `longest` tokens. A row that a run would refuse has a
    fault. Raises UserError if the file cannot be read."""
    for place, row in ConversationFile(path):
        try:
            ids, learned = tokenizer.encode_conversation(*parse_conversation(row))
        except UserError as error:
            yield InspectedConversation(place, fault=f"{place}: {error}")
            continue
        cut = itertools.groupby(zip(ids[:longest], learned, strict=False), lambda pair: pair[1] > 0)
        parts = tuple((tokenizer.detokenize([index for index, _ in group]), learns) for learns, group in cut)
        yield InspectedConversation(place, len(ids), sum(map(bool, learned)), parts)


def decoded_documents(
    path_prefix: str, tokenizer: Tokenizer, first: int, count: int, longest: int
) -> Iterator[tuple[str, str]]:
    """Yields a title and the text of documents `first` to `first + count - 1`, up to `longest` tokens of each.

    If the tokenizer does not know an id, yields the ids instead of the text. Raises UserError if `first` is beyond the
    last document.
    """
    dataset = IndexedDataset(path_prefix)
    bounds = dataset.document_indices
    documents = len(bounds) - 1
    if not 0 <= first < documents:
        raise UserError(f"--first-document {first}: {path_prefix} has documents 0 to {documents - 1}")
    for document in range(first, min(first + count, documents)):
        sequences = range(int(bounds[document]), int(bounds[document + 1]))
        length = int(dataset.sequence_lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        ids: list[int] = []
        for sequence in sequences:
            if len(ids) >= longest:
                break
            ids += dataset[sequence].tolist()
        title = f"document {document}: {len(sequences)} sequences, {length} tokens"
        title += f", the first {longest}" if length > longest else ""
        text = f"ids {ids[:longest]}"
        with suppress(UserError, KeyError, IndexError, OverflowError, ValueError):
            text = tokenizer.detokenize(ids[:longest])
        yield title, text
