"""Reads and writes sequences of tokens in a .bin file with its .idx file (formats: bin_file.py, index_format.py)."""

import hashlib
import os
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.utils.files import sync_directory
from megatron.data.datasets import object_store
from megatron.data.datasets.bin_file import map_or_read, open_bin
from megatron.data.datasets.index_format import DType, get_bin_path, get_idx_path, read_header, write_index
from megatron.data.datasets.object_store import is_url, local_copy

__all__ = ["DType", "IndexedDataset", "IndexedDatasetBuilder", "get_bin_path", "get_idx_path"]

_CHECKED_AT_ONCE = 1 << 18
_DIGEST_BLOCKS = 64
_DIGEST_BLOCK_BYTES = 4096


class IndexCache(Protocol):
    """Megatron-LM's ObjectStorageConfig: where copies of index files are kept."""

    path_to_idx_cache: str


class IndexedDataset(torch.utils.data.Dataset):
    """Random access to the sequences of `<path_prefix>.bin` and `.idx`.

    Args:
        path_prefix: common path of the two files, without suffix. It may be the URL of objects in a store
            (object_store.py).
        multimodal: the .idx file ends with a mode for each sequence (its header does not say so). Items are then
            (tokens, mode).
        mmap: has no effect: the .bin file is always read by position (bin_file.py).
        object_storage_config: for a URL: a local folder for a copy of the .idx file, or an object with such a
            `path_to_idx_cache`; None: it is read into memory.
        dtype_code, sequences_per_dataset: expected token type, and expected numbers of sequences and of document
            indices. They are compared with the file.
        num_ids: reading an id that is not in [0, num_ids) raises UserError; None: any id is read.

    Copies made by fork or pickle open the files themselves.

    Raises UserError, naming the file, if one does not exist, is too short or inconsistent, or if the sizes of .bin and
    .idx do not match.
    """

    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: str | os.PathLike[str] | IndexCache | None = None,
        s3_config: str | os.PathLike[str] | IndexCache | None = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: tuple[int, int] | None = None,
        dtype_code: int | None = None,
        num_ids: int | None = None,
    ) -> None:
        super().__init__()
        self._num_ids = num_ids
        storage = object_storage_config if object_storage_config is not None else s3_config
        self.initialize(path_prefix, multimodal, mmap, storage, fast_cache_load, sequences_per_dataset, dtype_code)

    def initialize(
        self,
        path_prefix: str,
        multimodal: bool,
        mmap: bool,
        object_storage_config: str | os.PathLike[str] | IndexCache | None = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: tuple[int, int] | None = None,
        dtype_code: int | None = None,
    ) -> None:
        """Opens and checks the files. The constructor calls it."""
        self.path_prefix = path_prefix
        self.multimodal = multimodal
        self.mmap = mmap
        storage = object_storage_config
        self._storage = (
            storage if storage is None or isinstance(storage, str | os.PathLike) else storage.path_to_idx_cache
        )
        self._idx_path = get_idx_path(path_prefix)
        if is_url(path_prefix) and self._storage is not None:
            self._idx_path = local_copy(self._idx_path, self._storage)
        self._header = read_header(self._idx_path)
        self._check_expectations(sequences_per_dataset, dtype_code)
        self._replaced_documents: np.ndarray | None = None
        self._digests: dict[bool, str] = {}
        self._open()
        self._check_sizes()

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Whether both files exist."""
        if is_url(path_prefix):
            return object_store.exists(get_idx_path(path_prefix)) and object_store.exists(get_bin_path(path_prefix))
        return Path(get_idx_path(path_prefix)).exists() and Path(get_bin_path(path_prefix)).exists()

    @property
    def dtype(self) -> np.dtype:
        """Type of the tokens in the .bin file."""
        return np.dtype(self._header.dtype)

    @property
    def sequence_lengths(self) -> np.ndarray:
        """int32 [sequences]: tokens in each sequence."""
        return self._lengths

    @property
    def document_indices(self) -> np.ndarray:
        """int64 [documents + 1]: 0, then for each document the number of sequences up to its end."""
        return self._document_indices

    def get_document_indices(self) -> np.ndarray:
        """Returns `document_indices`."""
        return self._document_indices

    def set_document_indices(self, document_indices: np.ndarray) -> None:
        """Replaces the document indices of this object. The files do not change."""
        self._document_indices = self._replaced_documents = document_indices
        self._digests.clear()

    @property
    def sequence_modes(self) -> np.ndarray | None:
        """int8 [sequences] in a multimodal dataset, otherwise None."""
        return self._modes

    def __len__(self) -> int:
        return self._header.num_sequences

    @overload
    def __getitem__(self, idx: int) -> Any: ...
    @overload
    def __getitem__(self, idx: slice) -> list[np.ndarray] | tuple[list[np.ndarray], np.ndarray]: ...
    def __getitem__(self, idx: int | slice) -> Any:
        """Returns sequence `idx` (with its mode if multimodal); for a slice, a list of sequences (and their modes)."""
        if isinstance(idx, slice):
            sequences = [self._read(i, 0, None) for i in range(*idx.indices(len(self)))]
            return sequences if self._modes is None else (sequences, self._modes[idx])
        return self.get(int(idx))

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """Returns `length` tokens (None: all) of sequence `idx` from token `offset` on; with its mode if multimodal.

        Raises IndexError if the sequence does not contain these tokens.
        """
        tokens = self._read(idx, offset, length)
        return tokens if self._modes is None else (tokens, self._modes[idx])

    def content_digest(self, with_documents: bool = False) -> str:
        """Returns a hex digest that distinguishes this content from other content at the same path.

        It covers the token type, all sequence lengths, the size of the .bin file and 64 of its blocks of 4 KiB, evenly
        spread. `with_documents` adds the document indices. It is computed once per opened dataset.
        """
        if with_documents not in self._digests:
            self._digests[with_documents] = self._find_digest(with_documents)
        return self._digests[with_documents]

    def _find_digest(self, with_documents: bool) -> str:
        size = self._bin_size()
        digest = hashlib.sha256(f"{self.dtype.name} {len(self)} {size}".encode())
        digest.update(self._lengths.data)
        if with_documents:
            digest.update(np.ascontiguousarray(self._document_indices).data)
        for start in np.linspace(0, max(size - _DIGEST_BLOCK_BYTES, 0), _DIGEST_BLOCKS, dtype=np.int64).tolist():
            digest.update(self._tokens.read(start, min(_DIGEST_BLOCK_BYTES, size - start), np.dtype(np.uint8)).data)
        return digest.hexdigest()

    def _read(self, idx: int, offset: int, length: int | None) -> np.ndarray:
        if not -len(self) <= idx < len(self):
            raise IndexError(f"{self.path_prefix}: sequence {idx} requested, there are {len(self)}")
        available = int(self._lengths[idx]) - offset
        count = available if length is None else length
        if offset < 0 or not 0 <= count <= available:
            raise IndexError(
                f"{self.path_prefix}: tokens [{offset}, {offset + count}) requested of sequence {idx}, "
                f"which has {self._lengths[idx]}"
            )
        start = int(self._pointers[idx]) + offset * self.dtype.itemsize
        if not 0 <= start <= self._bin_size() - count * self.dtype.itemsize:
            raise UserError(f"{get_idx_path(self.path_prefix)}: corrupt: sequence {idx} is outside the .bin file")
        tokens = self._tokens.read(start, count, self.dtype)
        if self._num_ids is not None and count:
            self._check_ids(tokens, self._num_ids, idx, offset)
        return tokens

    def _check_ids(self, tokens: np.ndarray, num_ids: int, idx: int, offset: int) -> None:
        # On a GPU an unknown id ends the process without a word about the data.
        signed = tokens.dtype.kind != "u"
        if np.maximum.reduce(tokens) >= num_ids or (signed and np.minimum.reduce(tokens) < 0):
            wrong = int(np.argmax((tokens < 0) | (tokens >= num_ids)))
            raise UserError(
                f"{get_bin_path(self.path_prefix)}: id {tokens[wrong]} at sequence {idx}, offset {offset + wrong}, but "
                f"the model has ids 0 to {num_ids - 1}; use the tokenizer that made the data, or prepare the data again"
            )

    def _open(self) -> None:
        header, idx_path = self._header, self._idx_path
        data = map_or_read(idx_path)
        self._lengths = np.frombuffer(data, np.int32, header.num_sequences, header.lengths_offset)
        self._pointers = np.frombuffer(data, np.int64, header.num_sequences, header.pointers_offset)
        self._document_indices = np.frombuffer(
            data, np.int64, header.num_document_indices, header.document_indices_offset
        )
        self._modes: np.ndarray | None = None
        if self.multimodal:
            if len(data) < header.modes_offset + header.num_sequences:
                raise UserError(f"{idx_path}: contains no modes; it was not written as multimodal")
            self._modes = np.frombuffer(data, np.int8, header.num_sequences, header.modes_offset)
        bin_path = get_bin_path(self.path_prefix)
        self._tokens = open_bin(bin_path)

    def _check_sizes(self) -> None:
        idx_path, bin_path = get_idx_path(self.path_prefix), get_bin_path(self.path_prefix)
        documents = self._document_indices
        ascending = bool((documents[1:] >= documents[:-1]).all())
        if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(self) or not ascending:
            raise UserError(f"{idx_path}: corrupt: its documents do not cover its {len(self)} sequences")
        if len(self) and int(self._lengths.min()) < 0:
            raise UserError(f"{idx_path}: corrupt: sequence {int(self._lengths.argmin())} has a negative length")
        expected = int(self._lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        if self._bin_size() != expected:
            raise UserError(f"{bin_path}: {self._bin_size()} bytes, {idx_path} says {expected}")
        misplaced = self._first_misplaced_sequence()
        if misplaced is not None:
            raise UserError(
                f"{idx_path}: corrupt: sequence {misplaced} does not begin where the one before it ends; without the "
                "right positions, tokens of other documents would be read; prepare the data again"
            )

    def _first_misplaced_sequence(self) -> int | None:
        """Returns the first sequence whose position is not the sum of the lengths before it; None if all positions are
        right."""
        lengths, pointers = self._lengths, self._pointers
        if len(self) and pointers[0] != 0:
            return 0
        for start in range(0, len(self), _CHECKED_AT_ONCE):
            following = pointers[start + 1 : start + 1 + _CHECKED_AT_ONCE]
            part = slice(start, start + len(following))
            wrong = pointers[part] + lengths[part] * np.int64(self.dtype.itemsize) != following
            if wrong.any():
                return start + 1 + int(wrong.argmax())
        return None

    def _check_expectations(self, sequences_per_dataset: tuple[int, int] | None, dtype_code: int | None) -> None:
        header = self._header
        found = (header.num_sequences, header.num_document_indices)
        if sequences_per_dataset is not None and tuple(sequences_per_dataset) != found:
            raise UserError(
                f"{self.path_prefix}: has {found} sequences and document indices, not {tuple(sequences_per_dataset)}"
            )
        if dtype_code is not None and DType.code_from_dtype(self.dtype) != dtype_code:
            raise UserError(f"{self.path_prefix}: contains {self.dtype.name}, not token type code {dtype_code}")

    def _bin_size(self) -> int:
        return self._tokens.size

    def __getstate__(self) -> dict[str, Any]:
        arguments = {"path_prefix": self.path_prefix, "multimodal": self.multimodal, "mmap": self.mmap}
        arguments["object_storage_config"] = self._storage
        return {"arguments": arguments, "num_ids": self._num_ids, "replaced_documents": self._replaced_documents}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._num_ids = state["num_ids"]
        self.initialize(**state["arguments"])
        if state["replaced_documents"] is not None:
            self.set_document_indices(state["replaced_documents"])


class IndexedDatasetBuilder:
    """Writes a .bin file item by item, and its .idx file in `finalize`.

    The .bin file gets its name in `finalize`; before that, and after a failure, an older file of that name is not
    changed. As a context manager, it removes the unfinished file after an exception.
    """

    def __init__(self, bin_path: str, dtype: type[np.number] = np.int32, multimodal: bool = False) -> None:
        self.dtype = dtype
        self.multimodal = multimodal
        self._bin_path = Path(bin_path)
        self._temporary = self._bin_path.with_name(f".{self._bin_path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
        self._file: BinaryIO = open(self._temporary, "xb")  # noqa: SIM115 (closed in finalize or abort)
        self._lengths = array("i")
        self._modes = array("b")
        self._document_indices = array("q", [0])

    def add_item(self, tensor: Tensor | np.ndarray | Sequence[int], mode: int = 0) -> None:
        """Appends a sequence to the current document, which `end_document` closes."""
        self._add_sequences(tensor, [len(tensor)], [mode])

    def add_document(
        self, tensor: Tensor | np.ndarray | Sequence[int], lengths: list[int], modes: list[int] | None = None
    ) -> None:
        """Appends a document: the tokens of its sequences end to end, and the length of each sequence.

        Raises ValueError if the lengths do not add up to the tokens, or a token does not fit the dtype.
        """
        self._add_sequences(tensor, lengths, modes if modes is not None else [0] * len(lengths))
        self.end_document()

    def end_document(self) -> None:
        """Closes a document, which consists of all sequences since the last call. It may be empty."""
        self._document_indices.append(len(self._lengths))

    def add_index(self, path_prefix: str) -> None:
        """Appends all documents of another dataset. Raises UserError if its dtype differs."""
        other = IndexedDataset(path_prefix, multimodal=self.multimodal)
        if other.dtype != np.dtype(self.dtype):
            raise UserError(
                f"{path_prefix}: contains {other.dtype.name}, but the output is {np.dtype(self.dtype).name}"
            )
        self._document_indices.frombytes((other.document_indices[1:] + len(self._lengths)).tobytes())
        self._lengths.frombytes(other.sequence_lengths.tobytes())
        if other.sequence_modes is not None:
            self._modes.frombytes(other.sequence_modes.tobytes())
        with open(get_bin_path(path_prefix), "rb") as file:
            shutil.copyfileobj(file, self._file, 1 << 24)

    def finalize(self, idx_path: str) -> None:
        """Renames the .bin file to its final name, then writes the .idx file. Both are synced to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._bin_path)
        sync_directory(self._bin_path.parent)
        lengths = np.frombuffer(self._lengths, np.int32)
        document_indices = np.frombuffer(self._document_indices, np.int64)
        modes = np.frombuffer(self._modes, np.int8) if self.multimodal else None
        write_index(idx_path, self.dtype, lengths, document_indices, modes)

    def abort(self) -> None:
        """Removes the unfinished file."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()

    def _add_sequences(
        self, tensor: Tensor | np.ndarray | Sequence[int], lengths: Sequence[int], modes: Sequence[int]
    ) -> None:
        tokens = tensor.numpy() if isinstance(tensor, Tensor) else np.asarray(tensor)
        if sum(lengths) != tokens.size or len(modes) != len(lengths):
            raise ValueError(f"{tokens.size} tokens for lengths {list(lengths)} and {len(modes)} modes")
        stored = tokens.astype(self.dtype)
        if not np.array_equal(stored, tokens):
            raise ValueError(f"token {tokens[stored != tokens][0]} does not fit {np.dtype(self.dtype).name}")
        self._file.write(stored.tobytes(order="C"))
        self._lengths.extend(lengths)
        if self.multimodal:
            self._modes.extend(modes)
