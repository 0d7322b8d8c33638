"""Encodes the values of a state dict that all ranks share, everything except sharded tensors, as JSON and tensors.

JSON has no tuples, tensors or keys that are not strings. Such a value becomes an object with one key that begins with
"$". `encode` lists the types that a checkpoint can contain. Others would need a pickle and are refused.
"""

import argparse
import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.dist_checkpointing.data_file import DTYPE_NAMES, DTYPES
from megatron.core.dist_checkpointing.manifest import BrokenCheckpoint
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

Json = Any

Placed = (ShardedTensor, ShardedObject, LocalNonpersistentObject)
"""Types of values that are not part of the shared state."""
Path = tuple[Any, ...]
"""Keys and indices of a value in a nested state dict."""

_OMITTED = {"$elsewhere": True}
"""Replaces a sharded tensor, or a value that is not saved, in a list."""


def path_text(path: Path) -> str:
    """Returns a path as text, for messages and for the names of tensors."""
    return ".".join(map(str, path)) or "the state dict"


def leaves(value: object, kinds: tuple[type, ...], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields all objects of some types in nested dicts, lists and tuples, each with its path."""
    if isinstance(value, kinds):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, kinds, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, kinds, (*path, index))


def encode(value: Any, tensors: dict[str, Tensor], path: Path = ()) -> Json:
    """Returns the value as JSON. Adds its tensors to `tensors`, under the names by which the JSON refers to them.

    Takes None, bool, int, float, str, torch.dtype, argparse.Namespace, dicts, lists, tuples and tensors. Raises
    UserError for other types, naming the path.
    """
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Placed):
        return _OMITTED
    if isinstance(value, Tensor):
        return _encode_tensor(value, tensors, path)
    if isinstance(value, list):
        return [encode(item, tensors, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, tensors, (*path, index)) for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path)
    if isinstance(value, torch.dtype) and value in DTYPE_NAMES:
        return {"$dtype": DTYPE_NAMES[value]}
    if isinstance(value, argparse.Namespace):
        return {"$namespace": encode(vars(value), tensors, path)}
    raise UserError(
        f"{path_text(path)} is a {type(value).__name__}, which a checkpoint cannot contain; convert it to "
        "numbers, strings, lists, dicts or tensors, or wrap it in LocalNonpersistentObject to leave it out"
    )


def _encode_tensor(value: Tensor, tensors: dict[str, Tensor], path: Path) -> Json:
    name = f"common.{path_text(path)}"
    if name in tensors:
        raise UserError(f"two tensors of the state dict have the name {name}")
    tensors[name] = value.detach().contiguous()
    content = tensors[name].cpu().reshape(-1).view(torch.uint8).numpy().data if value.numel() else b""
    return {"$tensor": [name, DTYPE_NAMES[value.dtype], list(value.shape), zlib.crc32(content)]}


def _encode_mapping(value: Mapping[object, object], tensors: dict[str, Tensor], path: Path) -> Json:
    here = {key: encode(item, tensors, (*path, key)) for key, item in value.items() if not isinstance(item, Placed)}
    if all(isinstance(key, str) and not key.startswith("$") for key in here):
        return here
    return {"$dict": [[encode(key, tensors, (*path, key)), item] for key, item in here.items()]}


@contextlib.contextmanager
def refusing_forgeries(manifest: FilePath) -> Iterator[None]:
    """Makes the errors of `tensors_of` and `decode` for what `encode` never returns a BrokenCheckpoint of this file."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BrokenCheckpoint(
            manifest, f"its state is not what dist_checkpointing.save writes ({error!r:.200})"
        ) from error


def tensors_of(common: Json) -> dict[str, Tensor]:
    """Returns an uninitialized tensor, by name, for each tensor that an encoded value refers to."""
    found: dict[str, Tensor] = {}
    for _, entry in _tagged(common, "$tensor"):
        name, dtype, shape, _ = entry
        found[name] = torch.empty(shape, dtype=DTYPES[dtype])
    return found


def _tagged(value: Json, tag: str) -> Iterator[tuple[str, Json]]:
    if isinstance(value, dict):
        if set(value) == {tag}:
            yield tag, value[tag]
        for item in value.values():
            yield from _tagged(item, tag)
    elif isinstance(value, list):
        for item in value:
            yield from _tagged(item, tag)


def decode(value: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the value that was encoded. Sharded tensors and values that were not saved are None."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, content), *_ = value.items()
        if tag in _DECODERS:
            return _DECODERS[tag](content, tensors)
    return {key: decode(item, tensors) for key, item in value.items()}


_DECODERS: dict[str, Callable[[Json, Mapping[str, Tensor]], object]] = {
    "$elsewhere": lambda content, tensors: None,
    "$tuple": lambda content, tensors: tuple(decode(item, tensors) for item in content),
    "$dict": lambda content, tensors: {decode(key, tensors): decode(item, tensors) for key, item in content},
    "$dtype": lambda content, tensors: DTYPES[content],
    "$namespace": lambda content, tensors: argparse.Namespace(**decode(content, tensors)),
    "$tensor": lambda content, tensors: tensors[content[0]],
}


def tensor_chunks(tensors: Mapping[str, Tensor]) -> Iterator[Chunk]:
    """Yields a chunk for each tensor of a common state. Tensors without elements are not stored."""
    for name, tensor in tensors.items():
        if tensor.numel():
            yield Chunk(name, tuple(tensor.shape), Box.whole(tuple(tensor.shape)), None, tensor)


def merged(requested: object, common: object, value_of: Callable[[Any], object]) -> Any:
    """Returns the loaded state dict: the decoded common values, and `value_of` each sharded tensor and each unsaved
    value of the request.

    Where `value_of` returns `LEFT_OUT`, a dict gets no key, and a list or tuple gets None.
    """
    if isinstance(requested, Placed):
        return value_of(requested)
    if isinstance(requested, Mapping):
        made = dict(common) if isinstance(common, Mapping) else {}
        for key, item in requested.items():
            if _holds_places(item):
                made[key] = merged(item, made.get(key), value_of)
        return {key: item for key, item in made.items() if item is not LEFT_OUT}
    if isinstance(requested, list | tuple) and _holds_places(requested):
        known = list(common) if isinstance(common, list | tuple) else []
        known += [None] * (len(requested) - len(known))
        items = [merged(*pair, value_of) for pair in zip(requested, known, strict=False)]
        return type(requested)(None if item is LEFT_OUT else item for item in items)
    return common


LEFT_OUT = object()
"""Marks a requested value that is not in the checkpoint."""


def _holds_places(value: object) -> bool:
    return isinstance(value, Mapping) or next(leaves(value, Placed), None) is not None
