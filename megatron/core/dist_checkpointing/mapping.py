"""What stands in a state dict in the place of a tensor that is spread over ranks: where this rank's part belongs."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

ReplicaId = int | tuple[int, ...]


@dataclass
class ShardedTensor:
    """This rank's part of a tensor that is stored under one key by all ranks together.

    The whole has `global_shape`. This rank's part begins at `global_offset` and extends by `local_shape`, before which
    stand `prepend_axis_num` axes along which it extends by one. `data` has `local_shape`; or, with `flattened_range`
    (a slice with start and stop), it is one-dimensional and holds that range of the part's elements in row-major order.
    Of copies on several ranks the one whose `replica_id` is 0 (or all zeros) is written. Parts of one tensor must cover
    it without overlap; they need not be of one size, and `axis_fragmentations`, the number of parts along each axis of
    a regular grid, serves only the methods that count in parts.

    Our own: `holders`, the global ranks that hold this very part, if they are known; they share the writing, whatever
    `replica_id` says. `stored`, what a load gives back in the place of `data`, which is a view of it.
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
        """A part of a regular grid: for each axis that is cut, (axis, number of this part along it, number of parts).

        Axes count the prepended ones first; an axis that is not named is whole. Of a `flattened_range`, `data` has only
        the range: then `local_shape` must be among `fields`.
        """
        if flattened_range is not None and "local_shape" not in fields:
            raise UserError(f"ShardedTensor {key}: local_shape says what flattened_range is a range of")
        local = tuple(fields.pop("local_shape", data.shape))
        shape, offset = [1] * prepend_axis_num + list(local), [0] * (prepend_axis_num + len(local))
        fragments = [1] * len(shape)
        for axis, number, count in rank_offsets:
            if not (0 <= axis < len(shape) and 0 <= number < count):
                raise UserError(
                    f"ShardedTensor {key}: {(axis, number, count)} is no part of a tensor of {len(shape)} axes"
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
        """What a chunk is, over the same memory."""
        flat, box = chunk.flat_range, chunk.box
        return cls(
            chunk.name,
            chunk.tensor.view(box.shape) if flat is None else chunk.flat,
            chunk.tensor.dtype,
            box.shape,
            chunk.global_shape,
            box.start,
            None,
            flattened_range=None if flat is None else slice(*flat),
            holders=chunk.holders,
        )

    def validate_metadata_integrity(self) -> None:
        """Raises UserError where the fields contradict each other."""
        for problem in self._problems():
            raise UserError(f"ShardedTensor {self.key}: {problem}")

    def _problems(self) -> "list[str]":
        dims = len(self.global_shape)
        extents = self._extents
        if not len(self.global_offset) == len(extents) == dims:
            return [
                f"global_shape {self.global_shape}, global_offset {self.global_offset} and local_shape "
                f"{self.local_shape} with {self.prepend_axis_num} prepended axes are not of one length"
            ]
        places = zip(self.global_offset, extents, self.global_shape, strict=True)
        if not all(offset >= 0 and offset + extent <= size for offset, extent, size in places):
            return [f"a part {extents} at {self.global_offset} is not inside of {self.global_shape}"]
        if self.axis_fragmentations is not None and len(self.axis_fragmentations) != dims:
            return [f"axis_fragmentations {self.axis_fragmentations} has not one entry an axis of {self.global_shape}"]
        return self._data_problems()

    def _data_problems(self) -> "list[str]":
        shape, flat = tuple(self.local_shape), self.flattened_range
        if flat is not None:
            if flat.step not in (None, 1) or flat.start is None or flat.stop is None:
                return [f"flattened_range {flat} needs start and stop, and no step"]
            if not 0 <= flat.start <= flat.stop <= math.prod(shape):
                return [f"flattened_range {flat} is not inside of {math.prod(shape)} elements"]
            shape = (flat.stop - flat.start,)
        if self.data is None:
            return []
        if tuple(self.data.shape) != shape:
            return [f"data has shape {tuple(self.data.shape)}, not {shape}"]
        return [f"data has dtype {self.data.dtype}, not {self.dtype}"] if self.data.dtype != self.dtype else []

    # Where it is -----------------------------------------------------------------------------------------------------

    @property
    def _extents(self) -> tuple[int, ...]:
        """Of this part along every axis of the whole."""
        return (1,) * self.prepend_axis_num + tuple(self.local_shape)

    @property
    def is_main_replica(self) -> bool:
        """This copy is the one to write."""
        return not any(self.replica_id) if isinstance(self.replica_id, tuple) else self.replica_id == 0

    @property
    def has_regular_grid(self) -> bool:
        """All parts are of one size, and it is known how many there are."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """The index that gives this part of the whole: a number for each prepended axis, then slices."""
        first = self.prepend_axis_num
        offsets, extents = self.global_offset, self._extents
        return (*offsets[:first], *(slice(a, a + n) for a, n in list(zip(offsets, extents, strict=True))[first:]))

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """`global_offset` counted in parts. Raises UserError off the grid of parts of this size."""
        extents = self._extents
        if any(offset % extent for offset, extent in zip(self.global_offset, extents, strict=True) if extent):
            raise UserError(f"ShardedTensor {self.key}: {self.global_offset} is no multiple of its part {extents}")
        return tuple(offset // max(extent, 1) for offset, extent in zip(self.global_offset, extents, strict=True))

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """How many parts like this one fit along each axis, the last one possibly shorter."""
        if self.axis_fragmentations is not None:
            return tuple(self.axis_fragmentations)
        return tuple(-(-size // max(extent, 1)) for size, extent in zip(self.global_shape, self._extents, strict=True))

    # Others like it --------------------------------------------------------------------------------------------------

    def without_data(self) -> "ShardedTensor":
        """The same place, with nothing in it."""
        return dataclasses.replace(self, data=None, stored=None)

    def init_data(self, device: str | torch.device, init_fn: Any = torch.empty) -> None:
        """Make `data`, if there is none."""
        if self.data is None:
            flat = self.flattened_range
            shape = self.local_shape if flat is None else (flat.stop - flat.start,)
            self.data = init_fn(shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> "list[ShardedTensor]":
        """What is left when every rank narrows its part, all alike, in one dimension (prepended axes not counted).

        Empty where a `flattened_range` has nothing of it. Raises UserError for a flattened range in another dimension
        than the first, of which the rest would not be one range.
        """
        axis, extent = dim + self.prepend_axis_num, self.local_shape[dim]
        if self.flattened_range is not None and dim:
            raise UserError(f"ShardedTensor {self.key}: a flattened range can be narrowed in its first dimension only")
        parts, place = self.global_shape[axis] / extent, self.local_chunk_offset_in_global()[axis]
        if parts != self.global_shape[axis] // extent:
            raise UserError(
                f"ShardedTensor {self.key}: not all parts are of one size, so they cannot be narrowed alike"
            )
        changed: dict[str, Any] = {
            "local_shape": _with(self.local_shape, dim, length),
            "global_shape": _with(self.global_shape, axis, int(parts) * length),
            "global_offset": _with(self.global_offset, axis, place * length),
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
        """This part as a checkpoint has it, held by a contiguous `tensor`."""
        flat = self.flattened_range
        box = Box(tuple(self.global_offset), self._extents)
        return Chunk(self.key, tuple(self.global_shape), box, flat and (flat.start, flat.stop), tensor, holders)


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


class LocalNonpersistentObject:
    """A value in a state dict that is not saved; a load gives back the one that was passed to it."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """The value."""
        return self.obj
