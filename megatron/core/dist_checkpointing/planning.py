"""Who writes what, and which stored chunk a rank reads for which of its own: computed without communication."""

import fnmatch
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.dist_checkpointing.chunk import MASTER, Chunk, optimizer_state_name
from megatron.core.dist_checkpointing.geometry import FlatRange, Overlap, check_tiling, overlaps
from megatron.core.dist_checkpointing.manifest import BrokenCheckpoint, RankIndex, StoredChunk
from megatron.core.exceptions import UserError

_CUT_ABOVE_BYTES = 1 << 20
"""A replicated chunk up to this size is written whole by one of its holders."""

# ---------------------------------------------------------------------------------------------------------------------
# Writing


def share_out(chunks: Iterable[Chunk], rank: int) -> list[Chunk]:
    """The part of these chunks that this rank writes.

    Chunks with the same holders are laid end to end, sorted by name and place, and cut into one equal run of bytes a
    holder; chunks of up to a megabyte go whole to the holder in whose run they begin. Every holder computes the same.
    Of a chunk that a rank has two copies of (a tied weight, where both ends of a pipeline are on one rank) one counts.
    """
    by_holders: dict[tuple[int, ...], dict[Any, Chunk]] = defaultdict(dict)
    for chunk in chunks:
        if chunk.tensor.numel():
            by_holders[chunk.holders or (rank,)].setdefault(_place(chunk), chunk)
    mine = []
    for holders, by_place in by_holders.items():
        shared = list(by_place.values())
        assert rank in holders, f"rank {rank} holds {shared[0]} but is not among its holders {holders}"
        mine += _my_range(shared, holders.index(rank), len(holders))
    return sorted(mine, key=_place)


def _place(chunk: Chunk) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    return chunk.name, chunk.box.start, chunk.range


def _my_range(chunks: Sequence[Chunk], position: int, count: int) -> list[Chunk]:
    total = sum(chunk.flat.nbytes for chunk in chunks)
    begin, end = total * position // count, total * (position + 1) // count
    mine, at = [], 0
    for chunk in sorted(chunks, key=_place):
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
    """Every tensor is stored whole and once. Raises BrokenCheckpoint naming the tensor and the files."""
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
class Located:
    """A stored chunk and the file name that it is in."""

    data_file: str
    chunk: StoredChunk


Catalogue = Mapping[str, Sequence[Located]]
"""All stored chunks of a checkpoint by canonical name."""


def make_catalogue(indexes: Iterable[RankIndex]) -> Catalogue:
    catalogue: dict[str, list[Located]] = defaultdict(list)
    for index in indexes:
        for chunk in index.chunks:
            catalogue[chunk.name].append(Located(index.data_file, chunk))
    return dict(catalogue)


@dataclass(frozen=True)
class Tolerance:
    """Which keys may be missing from a checkpoint, or unused in it, without an error. What is tolerated is told, what
    is left on purpose is not."""

    missing: bool = False
    """Any wanted key may be missing; the tensor keeps the values it has."""
    unused: bool = False
    """Any stored key may be left unused."""
    patterns: tuple[str, ...] = ()
    """Shell patterns of keys that may be missing or unused."""
    left: tuple[str, ...] = ()
    """The same of keys that nobody asked for, of which nothing is said where they are not used."""

    def allows(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in (*self.patterns, *self.left))

    def leaves(self, name: str) -> bool:
        """Whether nobody asked for it."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.left)


@dataclass
class Matching:
    """Which stored tensor each wanted chunk is read from."""

    sources: list[tuple[Chunk, str]] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    """Stored names that some wanted chunk was matched with, or whose values came from their counterpart."""
    notes: set[str] = field(default_factory=set)
    """Conversions made on the way."""


def match(chunks: Iterable[Chunk], catalogue: Catalogue) -> Matching:
    """Find the source of each wanted chunk by name. Raises UserError where the stored shape is another.

    A weight and its full-precision master (optimizer state `param`) stand in for each other: a run that keeps masters
    takes them from the weights of a checkpoint without; a weight whose stored type is not the wanted one comes from the
    stored master.
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
                "checkpoint: the model flags differ"
            )
        if stored.dtype != chunk.tensor.dtype:
            kinds = (str(dtype).removeprefix("torch.") for dtype in (stored.dtype, chunk.tensor.dtype))
            matching.notes.add("tensors stored as {} are kept as {}".format(*kinds))
        matching.sources.append((chunk, source))
    return matching


def _source(chunk: Chunk, catalogue: Catalogue, matching: Matching) -> str | None:
    master_prefix = optimizer_state_name(MASTER, "")
    if chunk.name.startswith(master_prefix):
        weight = chunk.name.removeprefix(master_prefix)
        source = chunk.name if chunk.name in catalogue else weight if weight in catalogue else None
        if source == weight:
            matching.notes.add("full-precision masters are read from the weights")
    else:
        master = master_prefix + chunk.name
        source = chunk.name if chunk.name in catalogue else None
        if source and master in catalogue and catalogue[source][0].chunk.dtype != chunk.tensor.dtype:
            matching.used.add(source)
            matching.notes.add("weights are read from the full-precision masters")
            source = master
    if source is not None:
        matching.used.add(source)
    return source


@dataclass(frozen=True)
class Fill:
    """A block of a data file and what to copy out of it: elements of wanted chunks, where they overlap."""

    source: Located
    block: int
    copies: list[tuple[Chunk, Overlap]]


def plan_reads(sources: Iterable[tuple[Chunk, str]], catalogue: Catalogue) -> list[Fill]:
    """The blocks to read, in the order in which they lie on disk, each once.

    Raises BrokenCheckpoint where the stored chunks do not hold every element of a wanted one exactly once.
    """
    copies: dict[tuple[str, int, int], Fill] = {}
    for chunk, name in sources:
        target = FlatRange(chunk.box, *chunk.range)
        found = 0
        for located in catalogue[name]:
            for block in _blocks_near(chunk.global_shape, target, located.chunk):
                shared = overlaps(chunk.global_shape, target, located.chunk.block_part(block))
                if shared:
                    key = (located.data_file, located.chunk.offset, block)
                    fill = copies.setdefault(key, Fill(located, block, []))
                    fill.copies.extend((chunk, overlap) for overlap in shared)
                    found += sum(overlap.numel for overlap in shared)
        if found != target.numel:
            raise BrokenCheckpoint(
                catalogue[name][0].data_file, f"{found} elements of {chunk} are stored, {target.numel} are wanted"
            )
    return [copies[key] for key in sorted(copies)]


def _blocks_near(shape: tuple[int, ...], target: FlatRange, stored: StoredChunk) -> Iterable[int]:
    """Blocks of a stored chunk that can hold elements of the target."""
    if len(stored.checksums) > 1 and not overlaps(shape, target, stored.part):
        return ()
    return range(len(stored.checksums))


def describe_names(names: Iterable[str], limit: int = 10) -> str:
    """Names for a message: the first few in order, and how many more."""
    ordered = sorted(names)
    shown = ", ".join(itertools.islice(ordered, limit))
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"


def used_flags(names: Sequence[str], used: set[str]) -> torch.Tensor:
    """One byte a stored name: 1 where this rank uses it."""
    return torch.tensor([name in used for name in names], dtype=torch.uint8)
