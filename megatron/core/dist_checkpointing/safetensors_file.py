"""Reads safetensors files of any program: the tensors in a file, and the elements of one tensor."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.data_file import DTYPES, MAX_HEADER_BYTES
from megatron.core.dist_checkpointing.manifest import BrokenCheckpoint
from megatron.core.utils.files import open_regular_file, parse_json


@dataclass(frozen=True)
class TensorInFile:
    """Position, type and shape of a tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Position of the first byte in the file."""
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInFile]:
    """Returns the tensors of a safetensors file by name. Raises BrokenCheckpoint if it is not a complete safetensors
    file."""
    try:
        with open_regular_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size >= 8 and length > MAX_HEADER_BYTES:
                raise BrokenCheckpoint(path, "not a safetensors file: its first 8 bytes are not the length of a header")
            if size < 8 + length:
                raise BrokenCheckpoint(path, f"cut off: it has {size} bytes, which is less than its header")
            fields = parse_json(file.read(length))
    except OSError as error:
        raise BrokenCheckpoint(path, error.strerror or str(error)) from error
    except BrokenCheckpoint:
        raise
    except ValueError as error:
        raise BrokenCheckpoint(path, f"not a safetensors file: its header is not JSON ({error})") from error
    try:
        tensors = {
            name: _located(path, name, entry, 8 + length, size)
            for name, entry in fields.items()
            if name != "__metadata__"
        }
    except BrokenCheckpoint:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BrokenCheckpoint(path, f"not a safetensors file ({error!r})") from error
    _check_disjoint(path, tensors)
    return tensors


def _check_disjoint(path: Path, tensors: dict[str, TensorInFile]) -> None:
    """Raises BrokenCheckpoint if two tensors have bytes in common, which no writer of safetensors produces."""
    in_order = sorted(tensors, key=lambda name: (tensors[name].offset, tensors[name].nbytes))
    for before, after in itertools.pairwise(in_order):
        end = tensors[before].offset + tensors[before].nbytes
        if end > tensors[after].offset:
            raise BrokenCheckpoint(
                path, f"{before} ends at byte {end}, but {after} begins at byte {tensors[after].offset}: they overlap"
            )


def _located(path: Path, name: str, entry: dict[str, Any], data_begin: int, file_size: int) -> TensorInFile:
    word, shape = str(entry["dtype"]), tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if word not in DTYPES:
        raise BrokenCheckpoint(path, f"{name} is of type {word}; {', '.join(sorted(DTYPES))} can be read")
    dtype = DTYPES[word]
    if torch.Size(shape).numel() * dtype.itemsize != end - begin:
        raise BrokenCheckpoint(path, f"{name} of shape {list(shape)} and type {word} has {end - begin} bytes")
    if not 0 <= begin <= end <= file_size - data_begin:
        raise BrokenCheckpoint(path, f"{name} ends at byte {data_begin + end}, the file at {file_size}")
    return TensorInFile(path, dtype, shape, data_begin + begin, end - begin)


def read_tensor(location: TensorInFile) -> Tensor:
    """Reads a tensor. Raises BrokenCheckpoint."""
    flat = torch.empty(location.nbytes, dtype=torch.uint8)
    try:
        with open_regular_file(location.path) as file:
            file.seek(location.offset)
            done, content = 0, flat.numpy().data
            while done < location.nbytes:
                got = file.readinto(content[done:])
                if not got:
                    raise BrokenCheckpoint(location.path, f"{location.nbytes - done} bytes are missing at its end")
                done += got
    except OSError as error:
        raise BrokenCheckpoint(location.path, error.strerror or str(error)) from error
    return flat.view(location.dtype).view(location.shape)
