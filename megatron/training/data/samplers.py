"""Which samples come in which order, and which of them this rank takes.

A sampler yields the ids of one micro-batch after another. The run's stream of samples does not depend on how it is laid
out: place p of the stream is row j of data parallel rank r in micro-batch m, where p = (m * d + r) * b + j for d ranks
and micro-batches of b. So any d and b that make up the same global batch take the same samples for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.exceptions import UserError

_PLACES_AT_ONCE = 4096


@dataclass(frozen=True)
class RankShare:
    """The part of the stream that one data parallel rank reads."""

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
        """Samples that all ranks read for one micro-batch each."""
        return self.micro_batch_size * self.num_ranks

    @property
    def offset(self) -> int:
        """Samples of the stride that precede this rank's."""
        return self.micro_batch_size * self.rank


class SequentialSampler:
    """Every sample once, in the dataset's own order (which a dataset has shuffled already). Published as `single`.

    Args:
        total_samples: length of the dataset.
        consumed_samples: place in the stream to start from.
        share: which part of it this rank reads.
        fill_to: what becomes of samples at the end that do not fill a micro-batch of every rank. None: they are left
            out. A number, such as the global batch size: the stream is filled up to a multiple of it with the id None,
            for which datasets give an item without loss.

    Raises UserError when nothing is left to read.
    """

    def __init__(self, total_samples: int, consumed_samples: int, share: RankShare, fill_to: int | None = None) -> None:
        if consumed_samples >= total_samples:
            raise UserError(
                f"all {total_samples} samples of the dataset are consumed ({consumed_samples} so far); "
                "build it with more samples (--train-iters, --train-samples), or use --dataloader-type cyclic"
            )
        if fill_to is not None and fill_to % share.stride:
            raise UserError(f"batches of {fill_to} samples cannot be made of {share.stride} at a time")
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.share = share
        self.fill_to = fill_to

    def __len__(self) -> int:
        """Micro-batches left for this rank."""
        left = self.total_samples - self.consumed_samples
        if self.fill_to is None:
            return left // self.share.stride
        return -(-left // self.fill_to) * self.fill_to // self.share.stride

    def __iter__(self) -> Iterator[list[int | None]]:
        for number in range(len(self)):
            first = self.consumed_samples + number * self.share.stride + self.share.offset
            places = range(first, first + self.share.micro_batch_size)
            yield [place if place < self.total_samples else None for place in places]


class CyclicSampler:
    """Epoch after epoch without end, each a new permutation of the whole dataset. Published as `cyclic`.

    The order is a function of (seed, epoch) alone; an epoch's last samples and the next one's first may share a batch.
    The published order depends on the layout and is kept in `MegatronCyclicSampler`.
    """

    def __init__(self, total_samples: int, consumed_samples: int, share: RankShare, seed: int) -> None:
        if total_samples < 1:
            raise UserError("--dataloader-type cyclic: the dataset has no samples")
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.share = share
        self.seed = seed

    def __iter__(self) -> Iterator[list[int | None]]:
        share = self.share
        at_once = max(1, _PLACES_AT_ONCE // share.micro_batch_size)
        firsts = self.consumed_samples + share.offset + np.arange(at_once, dtype=np.uint64) * np.uint64(share.stride)
        places = firsts[:, None] + np.arange(share.micro_batch_size, dtype=np.uint64)
        while True:
            yield from self.samples_at(places)
            places += np.uint64(at_once * share.stride)

    def samples_at(self, places: np.ndarray) -> list[Any]:
        """The ids at these places (uint64, any shape) of the stream, as nested lists."""
        total = np.uint64(self.total_samples)
        return permuted(places % total, self.total_samples, _mixed(places // total) ^ np.uint64(self.seed)).tolist()


class MegatronCyclicSampler:
    """The published `cyclic` order: it depends on the number of ranks and the micro-batch size.

    Each epoch leaves out what does not fill a batch. With `data_sharding` each rank permutes a part of its own;
    without, all read one permutation in turn.
    """

    def __init__(self, total_samples: int, consumed_samples: int, share: RankShare, data_sharding: bool = True) -> None:
        if total_samples < share.stride:
            raise UserError(f"--dataloader-type cyclic: {total_samples} samples do not fill a batch of {share.stride}")
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.share = share
        self.data_sharding = data_sharding

    def __iter__(self) -> Iterator[list[int | None]]:
        share = self.share
        active = self.total_samples - self.total_samples % share.stride
        consumed = self.consumed_samples
        while True:
            epoch, within = divmod(consumed, active)
            order = self._order(epoch, within)
            for first in range(0, len(order) - share.micro_batch_size + 1, share.micro_batch_size):
                yield list(order[first : first + share.micro_batch_size])
            consumed = (epoch + 1) * active

    def _order(self, epoch: int, within: int) -> list[int]:
        share = self.share
        generator = torch.Generator().manual_seed(epoch)
        if self.data_sharding:
            bucket = self.total_samples // share.stride * share.micro_batch_size
            order = torch.randperm(bucket, generator=generator)[within // share.num_ranks :]
            return (order + share.rank * bucket).tolist()
        full = self.total_samples // share.micro_batch_size * share.micro_batch_size
        return torch.randperm(full, generator=generator)[within:][share.rank :: share.num_ranks].tolist()


def permuted(places: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Where each place (uint64, below `size`) goes under the permutation of range(size) that its key stands for.

    A Feistel network of eight rounds over the least even number of bits that holds `size`; results beyond `size` go
    through it again until they are within, which keeps it a permutation. No table: any place in constant time.
    """
    half_bits = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    half = np.uint64((1 << int(half_bits)) - 1)
    keys = np.broadcast_to(keys, places.shape)
    result = places.astype(np.uint64)
    outside = np.ones(places.shape, bool)
    while outside.any():
        left, right = result[outside] >> half_bits, result[outside] & half
        for round_number in range(8):
            mixed = _mixed(right ^ _mixed(keys[outside] + np.uint64(round_number)))
            left, right = right, left ^ (mixed & half)
        result[outside] = (left << half_bits) | right
        outside = result >= np.uint64(size)
    return result


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every output bit depends on every input bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
