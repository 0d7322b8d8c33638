"""ShardedTensor: this rank's part of a tensor in a state dict, and the part's position in the whole tensor."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

ReplicaId = int | tuple[int, ...]
ShardedStateDict = dict[str, Any]
"""A nested state dict with `ShardedTensor`, `ShardedObject`, `ShardedTensorFactory` and plain values."""

CheckpointingException = UserError
"""Megatron-LM's name of the exception that saving and loading raise."""


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Returns whether the copy with this id is the one that is written."""
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0


@dataclass
class ShardedTensor:
    """This rank's part of a tensor that all ranks together store under one key.

    The whole tensor has `global_shape`. This rank's part begins at `global_offset`. Its shape is `local_shape`, after
    `prepend_axis_num` leading axes of size 1. `data` has `local_shape`. With `flattened_range` (a slice with start and
    stop), `data` is one-dimensional and contains this range of the part's elements in row-major order. If several ranks
    have copies of a part, the copy whose `replica_id` is 0 (or all zeros) is written. The parts of a tensor must cover
    it without overlap. They may have different sizes; `axis_fragmentations`, the number of parts along each axis of a
    regular grid, is used only by methods that count parts.

    Not in Megatron-LM: `holders` are the global ranks with a copy of this part, if known. They share the writing, and
    `replica_id` is ignored. `stored` is the tensor that a load returns instead of `data`, which is a view of it.
    """

    key: str
    data: Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None
    holders: tuple[int, ...] = ()
    stored: Tensor | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: slice | None = None,
        **fields: Any,
    ) -> "ShardedTensor":
        """Returns a part of a regular grid. `rank_offsets` are (axis, index of this part, number of parts) for each
        axis that is split.

        Prepended axes are counted first. With `flattened_range`, `data` contains only that range, so `fields` must
        include `local_shape`. Raises UserError if the values contradict each other.
        """
        if flattened_range is not None and "local_shape" not in fields:
            raise UserError(f"ShardedTensor {key}: flattened_range needs local_shape")
        local = tuple(fields.pop("local_shape", data.shape))
        shape, offset = [1] * prepend_axis_num + list(local), [0] * (prepend_axis_num + len(local))
        fragments = [1] * len(shape)
        for axis, number, count in rank_offsets:
            if not (0 <= axis < len(shape) and 0 <= number < count):
                raise UserError(
                    f"ShardedTensor {key}: {(axis, number, count)} is not a part of a tensor with {len(shape)} axes"
                )
            offset[axis], fragments[axis] = number * shape[axis], count
        return cls(
            key,
            data,
            data.dtype,
            local,
            tuple(extent * count for extent, count in zip(shape, fragments, strict=True)),
            tuple(offset),
            tuple(fragments),
            replica_id,
            prepend_axis_num,
            flattened_range=flattened_range,
            **fields,
        )

    @classmethod
    def from_chunk(cls, chunk: Chunk) -> "ShardedTensor":
        """Returns the part that a chunk describes, with the same memory, or with a copy of encoded memory."""
        flat, box = chunk.flat_range, chunk.box
        values = chunk.values()
        return cls(
            chunk.name,
            values.view(box.shape) if flat is None else values,
            chunk.tensor.dtype,
            box.shape,
            chunk.global_shape,
            box.start,
            None,
            flattened_range=None if flat is None else slice(*flat),
            holders=chunk.holders,
        )

    def validate_metadata_integrity(self) -> None:
        """Raises UserError if the fields contradict each other."""
        for problem in self._problems():
            raise UserError(f"ShardedTensor {self.key}: {problem}")

    def _problems(self) -> "list[str]":
        dims = len(self.global_shape)
        extents = self._extents
        if not len(self.global_offset) == len(extents) == dims:
            return [
                f"global_shape {self.global_shape}, global_offset {self.global_offset} and local_shape "
                f"{self.local_shape} with {self.prepend_axis_num} prepended axes have different lengths"
            ]
        axes = zip(self.global_offset, extents, self.global_shape, strict=True)
        if not all(offset >= 0 and offset + extent <= size for offset, extent, size in axes):
            return [f"a part {extents} at {self.global_offset} is not inside {self.global_shape}"]
        if self.axis_fragmentations is not None and len(self.axis_fragmentations) != dims:
            return [f"axis_fragmentations {self.axis_fragmentations} needs one entry per axis of {self.global_shape}"]
        return self._data_problems()

    def _data_problems(self) -> "list[str]":
        shape, flat = tuple(self.local_shape), self.flattened_range
        if flat is not None:
            if flat.step not in (None, 1) or flat.start is None or flat.stop is None:
                return [f"flattened_range {flat} needs start and stop, and no step"]
            if not 0 <= flat.start <= flat.stop <= math.prod(shape):
                return [f"flattened_range {flat} is not inside {math.prod(shape)} elements"]
            shape = (flat.stop - flat.start,)
        if self.data is None:
            return []
        if tuple(self.data.shape) != shape:
            return [f"data has shape {tuple(self.data.shape)}, not {shape}"]
        return [f"data has dtype {self.data.dtype}, not {self.dtype}"] if self.data.dtype != self.dtype else []

    # Position ------------------------------------------------------------------------------------------------------

    @property
    def _extents(self) -> tuple[int, ...]:
        """Size of this part along each axis of the whole tensor."""
        return (1,) * self.prepend_axis_num + tuple(self.local_shape)

    @property
    def is_main_replica(self) -> bool:
        """Whether this copy is the one that is written."""
        return is_main_replica(self.replica_id)

    @property
    def has_regular_grid(self) -> bool:
        """Whether all parts have the same size and their number is known."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """Returns the index of this part in the whole tensor: a number for each prepended axis, then slices."""
        first = self.prepend_axis_num
        offsets, extents = self.global_offset, self._extents
        return (*offsets[:first], *(slice(a, a + n) for a, n in list(zip(offsets, extents, strict=True))[first:]))

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Returns `global_offset` in parts. Raises UserError if it is not a multiple of this part's size."""
        extents = self._extents
        if any(offset % extent for offset, extent in zip(self.global_offset, extents, strict=True) if extent):
            raise UserError(f"ShardedTensor {self.key}: {self.global_offset} is not a multiple of the size {extents}")
        return tuple(offset // max(extent, 1) for offset, extent in zip(self.global_offset, extents, strict=True))

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Returns the number of parts of this size along each axis. The last one may be shorter."""
        if self.axis_fragmentations is not None:
            return tuple(self.axis_fragmentations)
        return tuple(-(-size // max(extent, 1)) for size, extent in zip(self.global_shape, self._extents, strict=True))

    # Copies ----------------------------------------------------------------------------------------------------------

    def without_data(self) -> "ShardedTensor":
        """Returns a copy without data."""
        return dataclasses.replace(self, data=None, stored=None)

    def init_data(self, device: str | torch.device, init_fn: Any = torch.empty) -> None:
        """Creates `data` with `init_fn` on a device, unless it exists."""
        if self.data is None:
            flat = self.flattened_range
            shape = self.local_shape if flat is None else (flat.stop - flat.start,)
            self.data = init_fn(shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> "list[ShardedTensor]":
        """Returns the part after all ranks have narrowed their parts in the same way in one dimension (not counting
        prepended axes).

        The list is empty if `flattened_range` contains no element of the rest. Raises UserError if parts have different
        sizes, and for a flattened range in any dimension but the first, since the rest would not be one range.
        """
        axis, extent = dim + self.prepend_axis_num, self.local_shape[dim]
        if self.flattened_range is not None and dim:
            raise UserError(f"ShardedTensor {self.key}: a flattened range can be narrowed in its first dimension only")
        parts, index = self.global_shape[axis] / extent, self.local_chunk_offset_in_global()[axis]
        if parts != self.global_shape[axis] // extent:
            raise UserError(f"ShardedTensor {self.key}: parts have different sizes and cannot be narrowed")
        changed: dict[str, Any] = {
            "local_shape": _with(self.local_shape, dim, length),
            "global_shape": _with(self.global_shape, axis, int(parts) * length),
            "global_offset": _with(self.global_offset, axis, index * length),
            "stored": None,
        }
        if self.flattened_range is None:
            data = None if self.data is None else self.data.narrow(dim, start, length)
            return [dataclasses.replace(self, data=data, **changed)]
        row = math.prod(self.local_shape[1:])
        first, last = (
            max(self.flattened_range.start, start * row),
            min(self.flattened_range.stop, (start + length) * row),
        )
        if first >= last:
            return []
        data = None if self.data is None else self.data[first - self.flattened_range.start :][: last - first]
        changed["flattened_range"] = slice(first - start * row, last - start * row)
        return [dataclasses.replace(self, data=data, **changed)]

    def chunk(self, tensor: Tensor, holders: tuple[int, ...] = ()) -> Chunk:
        """Returns this part as a chunk. `tensor` is contiguous and has its elements."""
        flat = self.flattened_range
        box = Box(tuple(self.global_offset), self._extents)
        return Chunk(self.key, tuple(self.global_shape), box, flat and (flat.start, flat.stop), tensor, holders)


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


class LocalNonpersistentObject:
    """A value in a state dict that is not saved. A load returns the value of the request."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> object:
        """Returns the value."""
        return self.obj


@dataclass
class ShardedObject:
    """One of several objects that ranks store under one key: number `global_offset` in a grid of `global_shape`.

    `data` is what a checkpoint can contain: numbers, strings, tensors, and dicts, lists and tuples of these. The copy
    whose `replica_id` is 0 (or all zeros) is written. A load needs no data.
    """

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    @property
    def unique_key(self) -> str:
        """The key with the object's place in the grid."""
        place, grid = (".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{place}_{grid}"

    @property
    def is_main_replica(self) -> bool:
        """Whether this copy is the one that is written."""
        return is_main_replica(self.replica_id)

    def without_data(self) -> "ShardedObject":
        """Returns a copy without data."""
        return dataclasses.replace(self, data=None)


@dataclass
class ShardedTensorFactory:
    """A tensor that is stored as several others.

    `build_fn(key, data, replica_id, flattened_range)` returns the state dict that is saved or requested in its place;
    `merge_fn(loaded state dict)` returns the tensor.
    """

    key: str
    data: Tensor
    build_fn: Callable[..., ShardedStateDict]
    merge_fn: Callable[[object], Tensor]
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> ShardedStateDict:
        """Returns the state dict that stands for the tensor."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


def apply_factories(sharded_state_dict: object) -> Any:
    """Returns a copy of a state dict with every factory replaced by the result of its `build`."""
    if isinstance(sharded_state_dict, ShardedTensorFactory):
        return apply_factories(sharded_state_dict.build())
    if isinstance(sharded_state_dict, dict):
        return {key: apply_factories(value) for key, value in sharded_state_dict.items()}
    if isinstance(sharded_state_dict, list | tuple):
        return type(sharded_state_dict)(apply_factories(value) for value in sharded_state_dict)
    return sharded_state_dict


def apply_factory_merges(loaded: object, requested: object) -> Any:
    """Returns a loaded state dict in which the tensors of each factory in the request are merged again."""
    if isinstance(requested, ShardedTensorFactory):
        return requested.merge_fn(loaded)
    if isinstance(requested, dict) and isinstance(loaded, dict):
        return {
            key: apply_factory_merges(value, requested[key]) if key in requested else value
            for key, value in loaded.items()
        }
    if isinstance(requested, list | tuple) and isinstance(loaded, list | tuple):
        return type(loaded)(apply_factory_merges(*pair) for pair in zip(loaded, requested, strict=True))
    return loaded
