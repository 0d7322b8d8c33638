"""Plans of saves and loads: which rank writes which chunk, and which stored blocks a rank reads. No communication."""

import fnmatch
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron.core.dist_checkpointing.chunk import MASTER, Chunk, optimizer_state_name
from megatron.core.dist_checkpointing.geometry import FlatRange, Overlap, check_tiling, overlaps
from megatron.core.dist_checkpointing.manifest import BrokenCheckpoint, RankIndex, StoredChunk
from megatron.core.exceptions import UserError

_CUT_ABOVE_BYTES = 1 << 20
"""A replicated chunk of at most this size is written by a single holder."""

# ---------------------------------------------------------------------------------------------------------------------
# Writing


def assign_writes(chunks: Iterable[Chunk], rank: int) -> list[Chunk]:
    """Returns the chunks, or parts of chunks, that this rank writes.

    Chunks with the same holders are sorted by name and position, concatenated, and cut into equal ranges of bytes, one
    per holder. A chunk of at most one megabyte goes to the holder in whose range it begins. All holders compute the
    same assignment. If a rank lists a chunk twice (a tied weight, if both ends of a pipeline are on one rank), it is
    written once.
    """
    by_holders: dict[tuple[int, ...], dict[object, Chunk]] = defaultdict(dict)
    for chunk in chunks:
        if chunk.tensor.numel():
            by_holders[chunk.holders or (rank,)].setdefault(_sort_key(chunk), chunk)
    mine = []
    for holders, by_position in by_holders.items():
        shared = list(by_position.values())
        assert rank in holders, f"rank {rank} holds {shared[0]} but is not among its holders {holders}"
        mine += _my_range(shared, holders.index(rank), len(holders))
    return sorted(mine, key=_sort_key)


def _sort_key(chunk: Chunk) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    return chunk.name, chunk.box.start, chunk.range


def _my_range(chunks: Sequence[Chunk], position: int, count: int) -> list[Chunk]:
    total = sum(chunk.flat.nbytes for chunk in chunks)
    begin, end = total * position // count, total * (position + 1) // count
    mine, at = [], 0
    for chunk in sorted(chunks, key=_sort_key):
        if chunk.flat.nbytes <= _CUT_ABOVE_BYTES:
            if begin <= at < end:
                mine.append(chunk)
        else:
            size = chunk.tensor.element_size()
            first, last = (min(max(-((at - cut) // size), 0), chunk.tensor.numel()) for cut in (begin, end))
            if first < last:
                mine.append(chunk.part(first, last))
        at += chunk.flat.nbytes
    return mine


def check_complete(catalogue: "Catalogue") -> None:
    """Checks that every element of every tensor is stored exactly once. Raises BrokenCheckpoint, naming tensor and
    files."""
    for name, stored in catalogue.items():
        shape = stored[0].chunk.global_shape
        for other in stored:
            if other.chunk.global_shape != shape:
                raise BrokenCheckpoint(
                    other.data_file, f"{name} has shape {other.chunk.global_shape} and elsewhere {shape}"
                )
        tiling = check_tiling(shape, [other.chunk.part for other in stored])
        if tiling.twice is not None:
            first, second = (stored[index].data_file for index in tiling.twice)
            raise BrokenCheckpoint(first, f"elements of {name} are also in {second}")
        if tiling.missing:
            raise BrokenCheckpoint(stored[0].data_file, f"{tiling.missing} elements of {name} are in no file")


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class LocatedChunk:
    """A stored chunk and the name of its data file."""

    data_file: str
    chunk: StoredChunk


Catalogue = Mapping[str, Sequence[LocatedChunk]]
"""All stored chunks of a checkpoint by canonical name."""


def make_catalogue(indexes: Iterable[RankIndex]) -> Catalogue:
    """Collects the chunks of all indexes by canonical name."""
    catalogue: dict[str, list[LocatedChunk]] = defaultdict(list)
    for index in indexes:
        for chunk in index.chunks:
            catalogue[chunk.name].append(LocatedChunk(index.data_file, chunk))
    return dict(catalogue)


@dataclass(frozen=True)
class MismatchPolicy:
    """Which keys may be missing in a checkpoint, or unused by a load, without an error. Exceptions are logged, except
    for `silent` keys that are unused."""

    missing: bool = False
    """Whether any wanted key may be missing. Its tensor keeps its values."""
    unused: bool = False
    """Whether any stored key may be left unused."""
    patterns: tuple[str, ...] = ()
    """Shell patterns of keys that may be missing or unused."""
    silent: tuple[str, ...] = ()
    """Shell patterns of keys that are left out on purpose. They may be missing or unused, and no line reports unused
    ones."""

    def allows(self, name: str) -> bool:
        """Whether a pattern allows this key to be missing or unused."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in (*self.patterns, *self.silent))

    def is_silent(self, name: str) -> bool:
        """Whether this key is left out on purpose."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.silent)


@dataclass
class Matching:
    """The stored tensors that wanted chunks are read from."""

    sources: list[tuple[Chunk, str]] = field(default_factory=list)
    """Wanted chunks, each with the name of the stored tensor that it is read from."""
    missing: set[str] = field(default_factory=set)
    """Names of wanted chunks without a stored tensor."""
    used: set[str] = field(default_factory=set)
    """Names of stored tensors that are read, or whose counterpart (weight or main weight) is read instead."""
    notes: set[str] = field(default_factory=set)
    """Sentences about conversions during the load."""


def match(chunks: Iterable[Chunk], catalogue: Catalogue) -> Matching:
    """Finds the stored tensor of each wanted chunk by name. Raises UserError if shapes differ.

    A weight and its full-precision copy (main weight, optimizer state `param`) can replace each other. A run with main
    weights reads them from the weights if the checkpoint has none. A weight that is stored in another type than wanted
    is read from the stored main weight.
    """
    matching = Matching()
    for chunk in chunks:
        source = _source(chunk, catalogue, matching)
        if source is None:
            matching.missing.add(chunk.name)
            continue
        stored = catalogue[source][0].chunk
        if stored.global_shape != chunk.global_shape:
            raise UserError(
                f"{chunk.name} has shape {list(chunk.global_shape)} in this run and {list(stored.global_shape)} in the "
                "checkpoint: give the flags of the checkpoint's model; --finetune, too, loads only equal shapes"
            )
        if stored.dtype != chunk.tensor.dtype:
            kinds = (str(dtype).removeprefix("torch.") for dtype in (stored.dtype, chunk.tensor.dtype))
            matching.notes.add("tensors stored as {} are loaded as {}".format(*kinds))
        matching.sources.append((chunk, source))
    return matching


def _source(chunk: Chunk, catalogue: Catalogue, matching: Matching) -> str | None:
    master_prefix = optimizer_state_name(MASTER, "")
    if chunk.name.startswith(master_prefix):
        weight = chunk.name.removeprefix(master_prefix)
        source = chunk.name if chunk.name in catalogue else weight if weight in catalogue else None
        if source == weight:
            matching.notes.add("full-precision main weights are read from the weights")
    else:
        master = master_prefix + chunk.name
        source = chunk.name if chunk.name in catalogue else None
        if source and master in catalogue and catalogue[source][0].chunk.dtype != chunk.tensor.dtype:
            matching.used.add(source)
            matching.notes.add("weights are read from the full-precision main weights")
            source = master
    if source is not None:
        matching.used.add(source)
    return source


@dataclass(frozen=True)
class BlockRead:
    """A block of a data file to read, and the overlaps to copy from it into wanted chunks."""

    source: LocatedChunk
    block: int
    copies: list[tuple[Chunk, Overlap]]


def plan_reads(sources: Iterable[tuple[Chunk, str]], catalogue: Catalogue) -> list[BlockRead]:
    """Returns the blocks to read, each once, in their order on disk.

    Raises BrokenCheckpoint if the stored chunks do not contain every element of a wanted chunk exactly once.
    """
    reads: dict[tuple[str, int, int], BlockRead] = {}
    for chunk, name in sources:
        target = FlatRange(chunk.box, *chunk.range)
        found = 0
        for located in catalogue[name]:
            for block in _blocks_near(chunk.global_shape, target, located.chunk):
                shared = overlaps(chunk.global_shape, target, located.chunk.block_part(block))
                if shared:
                    key = (located.data_file, located.chunk.offset, block)
                    read = reads.setdefault(key, BlockRead(located, block, []))
                    read.copies.extend((chunk, overlap) for overlap in shared)
                    found += sum(overlap.numel for overlap in shared)
        if found != target.numel:
            raise BrokenCheckpoint(
                catalogue[name][0].data_file, f"{found} elements of {chunk} are stored, {target.numel} are wanted"
            )
    return [reads[key] for key in sorted(reads)]


def _blocks_near(shape: tuple[int, ...], target: FlatRange, stored: StoredChunk) -> Iterable[int]:
    """Blocks of a stored chunk that can contain elements of the target."""
    if len(stored.checksums) > 1 and not overlaps(shape, target, stored.part):
        return ()
    return range(len(stored.checksums))


def describe_names(names: Iterable[str], limit: int = 10) -> str:
    """Returns names for a message: the first `limit` in alphabetical order, and the number of the others."""
    ordered = sorted(names)
    shown = ", ".join(itertools.islice(ordered, limit))
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"


def used_flags(names: Sequence[str], used: set[str]) -> torch.Tensor:
    """Returns a uint8 vector with one element per name: 1 if this rank uses it, otherwise 0."""
    return torch.tensor([name in used for name in names], dtype=torch.uint8)
