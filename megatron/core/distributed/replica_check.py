"""Compares the weights of data parallel replicas. They are equal to the bit unless the hardware failed or a script's
own code has a bug."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.communication.collectives import all_gather
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.fp8_unit import Fp8Unit

_PIECE = 1 << 22
"""Elements that are summed at once, so that a checksum needs little memory."""
_PRIME = 1_000_003


@dataclass(frozen=True)
class ReplicaDifference:
    """A unit whose weights differ between replicas."""

    unit: str
    """Name of the unit, such as decoder.layers.3."""
    replicas: tuple[int, ...]
    """Indices in the data parallel group of the replicas that differ from most others."""


def differing_units(chunks: Sequence[DistributedDataParallel]) -> list[ReplicaDifference]:
    """Returns the units of these model chunks whose weights are not equal to the bit on all ranks that hold a copy.

    All ranks of the data parallel groups call this together, and each rank of a group gets the same result. Waits for
    weights that are being gathered. Sharded parameters have copies only with several optimizer instances.
    """
    for chunk in chunks:
        chunk.finish_param_sync()
    held: dict[str, list[tuple[DistributedDataParallel, Unit, Tensor]]] = {}
    for chunk, unit, group, weights in _copies(chunks):
        held.setdefault(group, []).append((chunk, unit, weights))
    found = []
    for name, units in held.items():
        own = torch.stack([checksum(weights) for _, _, weights in units])
        sums = torch.stack(all_gather(own, getattr(units[0][0].pg_collection, name))).tolist()  # [replicas, units]
        for index, (_, unit, _) in enumerate(units):
            column = [row[index] for row in sums]
            ((usual, _),) = Counter(column).most_common(1)
            others = tuple(replica for replica, value in enumerate(column) if value != usual)
            if others:
                found.append(ReplicaDifference(unit.plan.name, others))
    return found


def _copies(
    chunks: Sequence[DistributedDataParallel],
) -> Iterator[tuple[DistributedDataParallel, Unit, str, Tensor]]:
    """Yields each unit with the name of the group whose ranks hold a copy of its weights, and this rank's copy."""
    for chunk in chunks:
        for unit in chunk.units:
            sharding = unit.sharding
            group = sharding.replica_group if unit.shards_weights else sharding.data_group
            is_alone = sharding.instances == 1 if unit.shards_weights else chunk.pg_collection.size(group) == 1
            if not is_alone:
                yield chunk, unit, group, _held(unit)


def _held(unit: Unit) -> Tensor:
    """Returns the weights of which the ranks of a group have copies."""
    if unit.shards_weights:
        return unit.model_shard()
    return unit.codes if isinstance(unit, Fp8Unit) else unit.param_buffer


@torch.no_grad()
def checksum(values: Tensor) -> Tensor:
    """Returns an integer, as a tensor without dimensions, that depends on the bits of a one-dimensional tensor and on
    their order. It is computed on the tensor's device."""
    bits = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    places = torch.arange(1, min(_PIECE, max(1, bits.numel())) + 1, device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in bits.split(_PIECE):
        total = total * _PRIME + (piece.long() * places[: piece.numel()]).sum()
    return total
