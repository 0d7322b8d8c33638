"""The order of samples, and the samples that this rank reads.

A sampler yields the ids of one micro-batch after another. The run's stream of samples does not depend on the layout:
position p of the stream is row j of data parallel rank r in micro-batch m, where p = (m * d + r) * b + j for d ranks
and micro-batches of b. So all d and b that give the same global batch size read the same samples for a global batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.exceptions import UserError

_POSITIONS_AT_ONCE = 4096


@dataclass(frozen=True)
class DataParallelShard:
    """The part of the stream that one data parallel rank reads. Raises UserError for impossible sizes."""

    micro_batch_size: int
    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise UserError(f"--micro-batch-size {self.micro_batch_size}: expected 1 or more")
        if not 0 <= self.rank < self.num_ranks:
            raise UserError(f"data parallel rank {self.rank} of {self.num_ranks}")

    @property
    def stride(self) -> int:
        """Number of samples in one micro-batch of each rank, over all ranks."""
        return self.micro_batch_size * self.num_ranks

    @property
    def offset(self) -> int:
        """Number of samples of a stride that belong to lower ranks."""
        return self.micro_batch_size * self.rank


class SequentialSampler:
    """Every sample once, in the dataset's own order, which is already shuffled. Megatron-LM's `single`.

    Args:
        total_samples: length of the dataset.
        consumed_samples: position in the stream to start from.
        shard: the part of the stream that this rank reads.
        fill_to: None: samples at the end that do not fill a micro-batch of every rank are left out. A number, such as
            the global batch size: the stream is filled up to a multiple of it with the id None, for which datasets
            return an item without loss.

    Raises UserError if all samples are consumed.
    """

    def __init__(
        self, total_samples: int, consumed_samples: int, shard: DataParallelShard, fill_to: int | None = None
    ) -> None:
        if consumed_samples >= total_samples:
            raise UserError(
                f"all {total_samples} samples of the dataset are consumed ({consumed_samples} so far); "
                "build it with more samples (--train-iters, --train-samples), or use --dataloader-type cyclic"
            )
        if fill_to is not None and fill_to % shard.stride:
            raise UserError(f"batches of {fill_to} samples cannot be made of {shard.stride} at a time")
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.shard = shard
        self.fill_to = fill_to

    def __len__(self) -> int:
        """Returns the number of micro-batches left for this rank."""
        left = self.total_samples - self.consumed_samples
        if self.fill_to is None:
            return left // self.shard.stride
        return -(-left // self.fill_to) * self.fill_to // self.shard.stride

    def __iter__(self) -> Iterator[list[int | None]]:
        for number in range(len(self)):
            first = self.consumed_samples + number * self.shard.stride + self.shard.offset
            positions = range(first, first + self.shard.micro_batch_size)
            yield [position if position < self.total_samples else None for position in positions]


class CyclicSampler:
    """Endless epochs, each a new permutation of the whole dataset. For --dataloader-type cyclic.

    The order depends only on (seed, epoch). A batch may contain the last samples of an epoch and the first of the next.
    Megatron-LM's own order depends on the layout; `MegatronCyclicSampler` has it.
    """

    def __init__(self, total_samples: int, consumed_samples: int, shard: DataParallelShard, seed: int) -> None:
        if total_samples < 1:
            raise UserError("--dataloader-type cyclic: the dataset has no samples")
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.shard = shard
        self.seed = seed

    def __iter__(self) -> Iterator[list[int | None]]:
        shard = self.shard
        at_once = max(1, _POSITIONS_AT_ONCE // shard.micro_batch_size)
        firsts = self.consumed_samples + shard.offset + np.arange(at_once, dtype=np.uint64) * np.uint64(shard.stride)
        positions = firsts[:, None] + np.arange(shard.micro_batch_size, dtype=np.uint64)
        while True:
            yield from self.samples_at(positions)
            positions += np.uint64(at_once * shard.stride)

    def samples_at(self, positions: np.ndarray) -> list[Any]:
        """Returns the ids at these positions of the stream (uint64, any shape) as nested lists."""
        total = np.uint64(self.total_samples)
        return permuted(
            positions % total, self.total_samples, _mixed(positions // total) ^ np.uint64(self.seed)
        ).tolist()


class MegatronCyclicSampler:
    """Megatron-LM's `cyclic` order, which depends on the number of ranks and the micro-batch size.

    Each epoch leaves out samples that do not fill a batch. With `data_sharding`, each rank permutes a part of its own.
    Without it, all ranks read one permutation in turn.
    """

    def __init__(
        self, total_samples: int, consumed_samples: int, shard: DataParallelShard, data_sharding: bool = True
    ) -> None:
        if total_samples < shard.stride:
            raise UserError(f"--dataloader-type cyclic: {total_samples} samples do not fill a batch of {shard.stride}")
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.shard = shard
        self.data_sharding = data_sharding

    def __iter__(self) -> Iterator[list[int | None]]:
        shard = self.shard
        active = self.total_samples - self.total_samples % shard.stride
        consumed = self.consumed_samples
        while True:
            epoch, within = divmod(consumed, active)
            order = self._order(epoch, within)
            for first in range(0, len(order) - shard.micro_batch_size + 1, shard.micro_batch_size):
                yield list(order[first : first + shard.micro_batch_size])
            consumed = (epoch + 1) * active

    def _order(self, epoch: int, within: int) -> list[int]:
        shard = self.shard
        generator = torch.Generator().manual_seed(epoch)
        if self.data_sharding:
            bucket = self.total_samples // shard.stride * shard.micro_batch_size
            order = torch.randperm(bucket, generator=generator)[within // shard.num_ranks :]
            return (order + shard.rank * bucket).tolist()
        full = self.total_samples // shard.micro_batch_size * shard.micro_batch_size
        return torch.randperm(full, generator=generator)[within:][shard.rank :: shard.num_ranks].tolist()


class MegatronPretrainingSampler(SequentialSampler):
    """`SequentialSampler` with Megatron-LM's arguments, as batch sampler of a torch DataLoader."""

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        if not drop_last:
            raise UserError("MegatronPretrainingSampler(drop_last=False): not yet; all micro-batches are full ones")
        shard = DataParallelShard(micro_batch_size, data_parallel_rank, data_parallel_size)
        super().__init__(total_samples, consumed_samples, shard)


class MegatronPretrainingRandomSampler(MegatronCyclicSampler):
    """`MegatronCyclicSampler` with Megatron-LM's arguments, as batch sampler of a torch DataLoader. It does not end
    after an epoch."""

    def __init__(
        self,
        dataset: Any,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool,
    ) -> None:
        shard = DataParallelShard(micro_batch_size, data_parallel_rank, data_parallel_size)
        super().__init__(total_samples, consumed_samples, shard, data_sharding)


def permuted(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Returns the images of positions (uint64, below `size`) under permutations of range(size), which the keys select.

    A Feistel network of eight rounds over the smallest even number of bits for `size`. Results beyond `size` go through
    it again until they are below, which keeps it a permutation. Any position takes constant time, without a table.
    """
    half_bits = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    half = np.uint64((1 << int(half_bits)) - 1)
    keys = np.broadcast_to(keys, positions.shape)
    result = positions.astype(np.uint64)
    outside = np.ones(positions.shape, bool)
    while outside.any():
        left, right = result[outside] >> half_bits, result[outside] & half
        for round_number in range(8):
            mixed = _mixed(right ^ _mixed(keys[outside] + np.uint64(round_number)))
            left, right = right, left ^ (mixed & half)
        result[outside] = (left << half_bits) | right
        outside = result >= np.uint64(size)
    return result


def _mixed(values: np.ndarray) -> np.ndarray:
    """Computes the finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every output bit depends on every input
    bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
