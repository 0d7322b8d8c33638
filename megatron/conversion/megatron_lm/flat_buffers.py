"""Megatron-LM's optimizer state in flat buffers (`dp_reshardable`), cut into the parameters that it belongs to.

The checkpoint has the length of each bucket, but not the place of each parameter in it. The main weights show it:
rounded to the type of the weights, they equal the weights. So each parameter is found by its content, and no layout is
assumed.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megatron.conversion.megatron_lm.mixer_rows import RowOrder, row_orders
from megatron.conversion.megatron_lm.names import Found, SourceTensor
from megatron.conversion.megatron_lm.torch_dist import DistFolder, DistTensor
from megatron.core.dist_checkpointing.chunk import MASTER, is_weight, optimizer_state_name
from megatron.core.dist_checkpointing.planning import describe_names
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

_FLAT = re.compile(
    r"(?P<group>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)\.gbuf_idx_\d+\.dtype_\(.*\))"
    r"\.bucket_idx_(?P<bucket>\d+)\.(?P<kind>param|exp_avg|exp_avg_sq)"
)
_MARK = ".dp_group_idx_"
_SIGNATURE = 64
"""Elements that are compared before a whole parameter is."""
_STEP = 64
"""A parameter begins directly after the one before, or at the next multiple of this number."""


class FlatTensor(Protocol):
    """A one-dimensional tensor in a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, of one dimension."""

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""

    def read(self, box: Box) -> Tensor:
        """Returns the elements of a range."""


Bucket = Mapping[str, FlatTensor]
"""The flat tensors of a bucket by kind."""


@dataclass(frozen=True)
class _TheirParameter:
    """A parameter of Megatron-LM: a canonical tensor, or one expert of it."""

    name: str
    begin: int
    """First element in the canonical tensor."""
    numel: int


@dataclass(frozen=True)
class _Range:
    """Where a part's elements are."""

    bucket: Bucket
    begin: int
    numel: int

    def read(self, kind: str) -> Tensor:
        return self.bucket[kind].read(Box((self.begin,), (self.numel,)))


def is_flat_state(name: str) -> bool:
    """Whether a name in a checkpoint is that of a flat buffer, or of an object that describes one."""
    return _MARK in name


def find_flat_state(
    folder: DistFolder, tensors: Mapping[str, DistTensor], shapes: Mapping[str, Sequence[int]], found: Found
) -> None:
    """Adds main weights and moments to `found`, whose weights are known. Raises UserError if a parameter is not found
    in the buffers, and for buffers of several model parallel ranks."""
    place_flat_state(_buckets(folder, tensors), shapes, found, str(folder.path))


def place_flat_state(buckets: Sequence[Bucket], shapes: Mapping[str, Sequence[int]], found: Found, source: str) -> None:
    """Finds the parameters of `shapes`, whose weights are in `found`, in flat buffers, and adds their main weights and
    moments. `source` names the checkpoint in errors. Raises UserError if a parameter is in no buffer."""
    orders = row_orders(shapes)
    weights = {name: _as_in_module(tensor, orders.get(name)) for name, tensor in found.tensors.items()}
    parts = _parts(shapes)
    index = _Index(parts, weights)
    places: dict[_TheirParameter, _Range] = {}
    for bucket in buckets:
        places |= index.place_all(bucket)
    lost = {part.name for part in parts if part not in places and not part.name.endswith("expert_bias")}
    if lost:
        raise UserError(
            f"{source}: its flat optimizer state does not hold {describe_names(lost)} as the weights have it; "
            "let Megatron-LM save with --dist-ckpt-optim-fully-reshardable, or import with --no-load-optim"
        )
    if index.ambiguous:
        found.notes.append(
            f"{describe_names(index.ambiguous, 3)} have the values of other parameters: their order in the model says "
            "which optimizer state is theirs"
        )
    by_name: dict[str, list[_Range]] = defaultdict(list)
    for part in parts:
        if part in places:
            by_name[part.name].append(places[part])
    for name, ranges in by_name.items():
        for kind in (MASTER, "exp_avg", "exp_avg_sq"):
            dtype = ranges[0].bucket[kind].dtype
            found.add(optimizer_state_name(kind, name), dtype, partial(_joined, ranges, kind, orders.get(name)))


def _as_in_module(tensor: SourceTensor, order: RowOrder | None) -> SourceTensor:
    return tensor if order is None else SourceTensor(tensor.dtype, lambda: order.to_module(tensor.read()))


def _joined(ranges: Sequence[_Range], kind: str, order: RowOrder | None) -> Tensor:
    values = torch.cat([place.read(kind) for place in ranges]) if len(ranges) > 1 else ranges[0].read(kind)
    return values if order is None else order.from_module(values)


def _buckets(folder: DistFolder, tensors: Mapping[str, DistTensor]) -> list[Bucket]:
    """Returns the buckets of all buffers, each complete."""
    grouped: dict[tuple[str, int], dict[str, DistTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = _FLAT.fullmatch(name)
        if match is None or len(tensor.shape) != 1:
            raise UserError(f"{folder.path}: {name} is no flat optimizer state that is known here")
        if int(match["rank"]) > 0:
            raise UserError(
                f"{folder.path}: flat optimizer state of several model parallel ranks ({name}); let Megatron-LM save "
                "with --dist-ckpt-optim-fully-reshardable, or import with --no-load-optim"
            )
        grouped[match["group"], int(match["bucket"])][match["kind"]] = tensor
    for (group, number), bucket in grouped.items():
        if bucket.keys() != {"param", "exp_avg", "exp_avg_sq"} or len({t.shape for t in bucket.values()}) > 1:
            raise UserError(f"{folder.path}: bucket {number} of {group} has {', '.join(sorted(bucket))} only")
    return [grouped[key] for key in sorted(grouped)]


def _parts(shapes: Mapping[str, Sequence[int]]) -> list[_TheirParameter]:
    """Returns the parameters in the order of the model; experts one by one."""
    parts = []
    for name, shape in shapes.items():
        if not is_weight(name):
            continue
        numel = torch.Size(shape).numel()
        count = shape[0] if ".experts.linear_" in name else 1
        parts += [_TheirParameter(name, number * (numel // count), numel // count) for number in range(count)]
    return parts


class _Index:
    """Finds parameters by their first elements. Parameters of equal content are found from the last
    to the first, the order in which buffers hold them."""

    def __init__(self, parts: Sequence[_TheirParameter], weights: Mapping[str, SourceTensor]) -> None:
        self.weights = weights
        self.ambiguous: set[str] = set()
        self.by_signature: dict[bytes, list[_TheirParameter]] = defaultdict(list)
        self.dtypes: set[torch.dtype] = set()
        self.sizes: set[int] = set()
        for part in reversed(parts):
            values = self._weight(part)
            self.dtypes.add(values.dtype)
            self.sizes.add(min(part.numel, _SIGNATURE))
            self.by_signature[_bytes(values[:_SIGNATURE])].append(part)

    def place_all(self, bucket: Bucket) -> dict[_TheirParameter, _Range]:
        """Returns the parameters in a bucket, and where they are."""
        places: dict[_TheirParameter, _Range] = {}
        at, end = 0, bucket["param"].shape[0]
        while at < end:
            part = self._part_at(bucket, at)
            if part is None:
                at = (at // _STEP + 1) * _STEP  # padding, also that of a vocabulary
                continue
            places[part] = _Range(bucket, at, part.numel)
            at += part.numel
        return places

    def _part_at(self, bucket: Bucket, at: int) -> _TheirParameter | None:
        left = bucket["param"].shape[0] - at
        head = bucket["param"].read(Box((at,), (min(_SIGNATURE, left),)))
        for size in sorted(self.sizes, reverse=True):
            for dtype in self.dtypes if size <= left else ():
                candidates = self.by_signature.get(_bytes(head[:size].to(dtype)), [])
                fitting = [part for part in candidates if self._is_at(part, bucket, at)]
                if fitting:
                    if len(fitting) > 1:
                        self.ambiguous.add(fitting[0].name)
                    candidates.remove(fitting[0])
                    return fitting[0]
        return None

    def _is_at(self, part: _TheirParameter, bucket: Bucket, at: int) -> bool:
        if at + part.numel > bucket["param"].shape[0]:
            return False
        weight = self._weight(part)
        return _bytes(bucket["param"].read(Box((at,), (part.numel,))).to(weight.dtype)) == _bytes(weight)

    def _weight(self, part: _TheirParameter) -> Tensor:
        return self.weights[part.name].read()[part.begin : part.begin + part.numel]


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()
