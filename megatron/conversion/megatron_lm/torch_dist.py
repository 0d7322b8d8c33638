"""Reads folders of torch.distributed.checkpoint, as Megatron-LM's torch_dist format is, without torch's unpickler.

`.metadata` lists the tensors, the boxes that each is stored in, and for each box a file and the range of its bytes
there. Such a range is an archive of torch.save. `common.pt` has everything that is no sharded tensor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.conversion.megatron_lm.inert_pickle import (
    MAX_PICKLE_BYTES,
    Inert,
    Name,
    UnreadablePickle,
    read_pickle,
    shown,
)
from megatron.conversion.megatron_lm.torch_archive import DTYPES, StoredTensor, TorchArchive
from megatron.core.dist_checkpointing.geometry import intersect
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

METADATA = ".metadata"
COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
"""Name of the object that newer releases of Megatron-LM have instead of `common.pt`."""

_MODULE = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class _FileRange:
    """The bytes of one stored box."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class DistTensor:
    """A tensor of a folder: its shape and type, and where its boxes are."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Mapping[Box, _FileRange]
    folder: Path

    def read(self, box: Box) -> Tensor:
        """Returns the elements of a box in row-major order, one-dimensional. Reads one stored box after the other.

        Raises UserError if the stored boxes do not contain each element exactly once, or a file is damaged.
        """
        found, target = 0, torch.empty(box.shape, dtype=self.dtype)
        filled: Tensor | None = None
        for stored, place in self.boxes.items():
            shared = intersect(stored, box)
            if shared is None:
                continue
            source = self._tensor(stored, place)
            if len(box.shape) == 1:
                begin = shared.start[0] - stored.start[0]
                values = source.read(begin, begin + shared.shape[0])
            else:
                values = _inside(source.read().view(stored.shape), stored, shared)
            _inside(target, box, shared).copy_(values)
            found += shared.numel
            if shared.numel < box.numel:
                filled = torch.zeros(box.shape, dtype=torch.bool) if filled is None else filled
                _inside(filled, box, shared).fill_(True)
        if filled is not None:
            found = min(found, int(filled.sum()))  # fewer if boxes overlap
        if found != box.numel:
            raise UserError(f"{self.folder / METADATA}: {found} of {box.numel} elements of {self.name} are stored")
        return target.view(-1)

    def _tensor(self, stored: Box, place: _FileRange) -> StoredTensor:
        tensor = _load(self.folder / place.file, place.begin, place.length)
        if not isinstance(tensor, StoredTensor) or tensor.shape != stored.shape or tensor.dtype != self.dtype:
            raise UserError(
                f"{self.folder / place.file}: at byte {place.begin} there is no {self.dtype} tensor {self.name} "
                f"of shape {list(stored.shape)}"
            )
        return tensor


@lru_cache(maxsize=4)
def _load(path: Path, begin: int, length: int) -> object:
    """Returns the object at a place. The last ones are kept, so that a flat buffer is verified once, not at each
    read."""
    return TorchArchive(path, begin, length).load()


def _inside(values: Tensor, outer: Box, inner: Box) -> Tensor:
    """Returns a view of the part `inner` of a tensor that holds `outer`."""
    for dim, (first, begin, size) in enumerate(zip(inner.start, outer.start, inner.shape, strict=True)):
        values = values.narrow(dim, first - begin, size)
    return values


class DistFolder:
    """A folder in the torch_dist format. Raises UserError for a damaged or hostile one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = _read(path / METADATA)
        metadata = read_pickle(content, str(path / METADATA))
        try:
            self.tensors, self.objects = self._parse(metadata)
        except (UnreadablePickle, TypeError, ValueError, AttributeError, LookupError) as error:
            raise UserError(f"{path / METADATA}: not the metadata of torch.distributed.checkpoint ({error})") from None

    @cached_property
    def common(self) -> dict[Any, Any]:
        """Everything that is no sharded tensor, as inert data."""
        inside = COMMON_OBJECT in self.objects
        found = self.object(COMMON_OBJECT) if inside else TorchArchive(self.path / COMMON).load()
        if inside and isinstance(found, list) and len(found) == 1:
            found = found[0]
        if not isinstance(found, dict):
            raise UserError(f"{self.path}: {COMMON_OBJECT if inside else COMMON} is not a dict")
        return found

    def object(self, name: str) -> Any:
        """Returns a sharded object as inert data."""
        place = self.objects[name]
        return TorchArchive(self.path / place.file, place.begin, place.length).load()

    def _parse(self, metadata: Any) -> tuple[dict[str, DistTensor], dict[str, _FileRange]]:
        places = self._places(metadata.attribute("storage_data"))
        tensors: dict[str, DistTensor] = {}
        objects: dict[str, _FileRange] = {}
        for name, entry in metadata.attribute("state_dict_metadata").items():
            if not isinstance(name, str):
                raise ValueError(f"the name of a tensor is a {type(name).__name__}")
            if str(entry.made_by) == f"{_MODULE}.BytesStorageMetadata":
                objects[name] = places[name, None]
            elif str(entry.made_by) == f"{_MODULE}.TensorStorageMetadata":
                tensors[name] = self._tensor(name, entry, places)
            else:
                raise ValueError(f"{name} is a {entry.made_by}")
        return tensors, objects

    def _tensor(self, name: str, entry: Inert, places: Mapping[Any, _FileRange]) -> DistTensor:
        shape = _numbers(entry.attribute("size"))
        dtype = _dtype(entry.attribute("properties"))
        boxes = {}
        for chunk in entry.attribute("chunks"):
            box = Box(_numbers(chunk.attribute("offsets")), _numbers(chunk.attribute("sizes")))
            if len(box.start) != len(shape) or len(box.shape) != len(shape):
                raise ValueError(f"a box of {name} has other dimensions")
            if any(begin + size > whole for begin, size, whole in zip(box.start, box.shape, shape, strict=True)):
                raise ValueError(f"a box of {name} is outside of it")
            boxes[box] = places[name, box.start]
        if sum(box.numel for box in boxes) != math.prod(shape):
            raise ValueError(f"the boxes of {name} have {sum(box.numel for box in boxes)} elements, not all of it")
        return DistTensor(name, shape, dtype, boxes, self.path)

    def _places(self, entries: Mapping[Any, Any]) -> dict[Any, _FileRange]:
        """Returns where the bytes of each box are, by name and first index, and of each object, by name and None."""
        found = {}
        for index, info in entries.items():
            offset = index.state.get("offset")  # absent for an object
            file, (begin, length) = (
                info.attribute("relative_path"),
                _numbers((info.attribute("offset"), info.attribute("length"))),
            )
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
                raise ValueError(f"{shown(file)!r} is not the name of a file in this folder")
            if info.state.get("transform_descriptors"):
                raise ValueError(f"{file} is transformed (compressed)")
            name = index.attribute("fqn")
            if not isinstance(name, str):
                raise ValueError(f"the name of a tensor is a {type(name).__name__}")
            found[name, None if offset is None else _numbers(offset)] = _FileRange(file, begin, length)
        return found


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    if not isinstance(values, list | tuple) or not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise ValueError(f"{shown(values)} are no sizes")
    return tuple(values)


def _dtype(properties: Any) -> torch.dtype:
    """Returns the type of a TensorProperties, whose state is a tuple, or a dict in older releases of torch."""
    state = properties.state
    name = state["dtype"] if isinstance(state, dict) else state[0]
    if not isinstance(name, Name) or str(name) not in DTYPES:
        raise ValueError(f"a tensor of type {shown(name)}")
    return DTYPES[str(name)]


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_PICKLE_BYTES:
            raise UserError(f"{path}: {path.stat().st_size} bytes; at most {MAX_PICKLE_BYTES} are read")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
