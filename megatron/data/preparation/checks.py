"""Checks that a run's tokenizer made the ids of a data set, and that the model's vocabulary contains all of them."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron.core.exceptions import UserError
from megatron.core.utils.files import sha256_of_file
from megatron.data.datasets.bin_file import ReadBin
from megatron.data.datasets.index_format import get_bin_path, get_idx_path, read_header
from megatron.data.datasets.object_store import is_url, size_of
from megatron.data.preparation.manifest import DataManifest, get_manifest_path, read_manifest
from megatron.data.tokenizer.base import Tokenizer

_READ_BYTES = 256 << 20
"""Most bytes of a file that a run reads before it starts, which takes less than a second."""

_READ_BYTES_OF_RUN = 2 << 30
"""Most bytes that a run reads of all its data sets before it starts: a blend may have thousands."""

_READ_BYTES_WITH_MANIFEST = 8 << 20
"""Most bytes of ids that a run reads of a file that is too large to be compared with its manifest."""

_SCANNED_IDS = 1 << 18

_FEWEST_ZEROS = 1 << 12
"""Fewest ids of a part of a file that are taken for empty space if all of them are 0."""


def bytes_to_read(data_sets: int) -> int:
    """Returns how many bytes of each of its data sets a run reads before it starts."""
    return min(_READ_BYTES, _READ_BYTES_OF_RUN // max(data_sets, 1))


def check_data(
    path_prefix: str,
    tokenizer: Tokenizer,
    vocab_size: int,
    warn: Callable[[str], None],
    most_bytes: int = _READ_BYTES,
) -> DataManifest | None:
    """Checks that the ids of a data set are below `vocab_size`, and that `tokenizer` made them. One process of a run is
    enough.

    Uses the manifest if there is one; files of more than `most_bytes` are then compared by size, and some of their ids
    are read. Otherwise reads the ids: of a larger file, parts of `most_bytes` in all. Ids of object stores are not
    read. Returns the manifest. Raises UserError that names the file and the remedy.
    """
    manifest = check_manifest(path_prefix, tokenizer, vocab_size, warn, most_bytes)
    if is_url(path_prefix):
        return manifest
    if manifest is None:
        check_token_ids(path_prefix, vocab_size, most_bytes, warn)
    elif manifest.files["bin"].bytes > most_bytes:
        check_token_ids(path_prefix, vocab_size, min(most_bytes, _READ_BYTES_WITH_MANIFEST), warn)
    return manifest


def check_manifest(
    path_prefix: str,
    tokenizer: Tokenizer,
    vocab_size: int,
    warn: Callable[[str], None],
    most_bytes: int = _READ_BYTES,
    files: bool = True,
) -> DataManifest | None:
    """Compares a data set's manifest with its files (unless `files` is False) and with the run's tokenizer and
    vocabulary. The content of files up to `most_bytes` is compared by SHA-256. Returns None if the data set has no
    manifest. Raises UserError."""
    manifest = read_manifest(path_prefix)
    if manifest is None:
        return None
    path = get_manifest_path(path_prefix)
    made_by = manifest.tokenizer
    if made_by.vocab_size > vocab_size:
        raise UserError(
            f"{path}: made with the {made_by.type} of {made_by.vocab_size} ids, but the model has {vocab_size}; "
            "use the tokenizer that made the data"
        )
    if tokenizer.type_name == "NullTokenizer" != made_by.type:
        warn(
            f"{path}: made with a {made_by.type}; NullTokenizer stands in for it, so only the number of ids is compared"
        )
    elif made_by.digest != tokenizer.digest:
        raise UserError(
            f"{path}: made with a {made_by.type} of {made_by.vocab_size} ids (digest {made_by.digest[:12]}), but the "
            f"run has a {tokenizer.type_name} of {tokenizer.vocab_size} ids (digest {tokenizer.digest[:12]}); use the "
            "tokenizer that made the data, or prepare the data again (without the manifest only the range of ids is "
            "checked)"
        )
    for suffix, record in manifest.files.items() if files else ():
        if is_url(path_prefix):  # compares the size only, so that its bytes are not read twice
            found = size_of(f"{path_prefix}.{suffix}")
            if found != record.bytes:
                raise UserError(
                    f"{path_prefix}.{suffix}: not the file that {path} lists: {found} bytes, not {record.bytes}; copy "
                    "the data set again"
                )
            continue
        check_file(Path(f"{path_prefix}.{suffix}"), record.bytes, record.sha256, path, most_bytes)
    return manifest


def check_file(path: Path, size: int, sha256: str, manifest: str, most_bytes: int) -> None:
    """Compares a file with its record in a manifest. Reads its content if it has up to `most_bytes`.

    Raises UserError if it is missing, of another size or of other content.
    """
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{path}: missing, but {manifest} lists it") from None
    if found != size or (size <= most_bytes and sha256_of_file(path) != sha256):
        what = f"{found} bytes, not {size}" if found != size else "its content differs"
        raise UserError(f"{path}: not the file that {manifest} lists: {what}; prepare the data again")


def check_token_ids(
    path_prefix: str, vocab_size: int, most_bytes: int | None = None, warn: Callable[[str], None] = lambda text: None
) -> None:
    """Reads the ids of a data set; of a file with more than `most_bytes`, as many bytes in evenly spread parts. Raises
    UserError, naming document and offset, for the first id outside [0, vocab_size), and if all ids are 0 in a file of
    thousands: an interrupted copy leaves such a file. Warns if whole parts of the file are like this."""
    header = read_header(get_idx_path(path_prefix))
    path = get_bin_path(path_prefix)
    try:
        size = os.path.getsize(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    if size % np.dtype(header.dtype).itemsize:
        raise UserError(
            f"{path}: {size} bytes, which is no whole number of {np.dtype(header.dtype).name} ids; the file is cut off "
            "or of another type; prepare the data again"
        )
    if size == 0:
        return
    kind = np.dtype(header.dtype).newbyteorder("<")
    count = size // kind.itemsize
    starts = np.arange(0, count, _SCANNED_IDS)
    if most_bytes is not None and size > most_bytes:
        parts = max(1, most_bytes // (_SCANNED_IDS * kind.itemsize))
        starts = np.linspace(0, max(count - _SCANNED_IDS, 0), parts, dtype=np.int64)
    reader, empty, full = ReadBin(path), 0, 0
    for start in starts.tolist():
        chunk = reader.read(start * kind.itemsize, min(_SCANNED_IDS, count - start), kind)
        least, most = int(chunk.min()), int(chunk.max())
        if most >= vocab_size or least < 0:
            wrong = int(np.argmax((chunk < 0) | (chunk >= vocab_size)))
            raise UserError(
                f"{path}: id {chunk[wrong]} at {_describe_position(path_prefix, start + wrong)}, but the model has ids "
                f"0 to {vocab_size - 1}; use the tokenizer that made the data, or prepare the data again"
            )
        is_empty = least == most == 0
        empty += is_empty and chunk.size >= _FEWEST_ZEROS
        full += not is_empty
    _judge_empty_parts(path, empty, full, warn)


def _judge_empty_parts(path: str, empty: int, full: int, warn: Callable[[str], None]) -> None:
    if empty and not full:
        raise UserError(
            f"{path}: all ids that were read are 0, as after a copy that was interrupted; copy the data set again, or "
            "prepare it again (a small file that tools/preprocess_data.py has written like this is accepted, by its "
            "manifest)"
        )
    if empty:
        warn(
            f"{path}: {empty} of {empty + full} parts of the file that were read, of up to {_SCANNED_IDS} ids, are "
            "nothing but id 0, as after a copy that was interrupted; compare the file with its source"
        )


def _describe_position(path_prefix: str, token: int) -> str:
    """Returns words for the document that contains a token, and the token's offset in it."""
    header = read_header(get_idx_path(path_prefix))
    path = get_idx_path(path_prefix)
    arrays = []
    for dtype, offset, count in (
        ("<i4", header.lengths_offset, header.num_sequences),
        ("<i8", header.document_indices_offset, header.num_document_indices),
    ):
        arrays.append(np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)))
    lengths, document_indices = arrays
    ends = np.cumsum(lengths, dtype=np.int64)
    sequence = int(np.searchsorted(ends, token, side="right"))
    if sequence >= ends.size:
        return f"token {token}, beyond the last document"
    document = int(np.searchsorted(document_indices, sequence, side="right")) - 1
    first = int(document_indices[document])
    start = int(ends[first] - lengths[first])
    return f"document {document}, offset {token - start}"
