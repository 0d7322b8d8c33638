"""Plans of saves and loads: who writes which chunk, and which stored blocks a load reads."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import make_chunk

from megatron.core.dist_checkpointing.chunk import Chunk, optimizer_state_name
from megatron.core.dist_checkpointing.manifest import BrokenCheckpoint, RankIndex, StoredChunk
from megatron.core.dist_checkpointing.planning import (
    Catalogue,
    MismatchPolicy,
    assign_writes,
    check_complete,
    describe_names,
    make_catalogue,
    match,
    plan_reads,
    used_flags,
)
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

F32, BF16 = torch.float32, torch.bfloat16


def catalogue(*parts: tuple[str, tuple[int, ...], tuple[int, int], torch.dtype]) -> Catalogue:
    """A file for each (name, shape, range, dtype) of a stored chunk."""
    indexes = []
    for number, (name, shape, span, dtype) in enumerate(parts):
        stored = StoredChunk(name, shape, Box.whole(shape), span, dtype, name, 8, (0,))
        indexes.append(RankIndex(f"file{number}", 100, 0, (stored,)))
    return make_catalogue(indexes)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3_000_000), min_size=1, max_size=20),
    replicas=st.integers(1, 6),
)
def test_replicas_share_the_writing_evenly(sizes, replicas):
    holders = tuple(range(replicas))
    chunks = [
        Chunk(
            f"t{i:03d}", (n,), Box.whole((n,)), None, torch.from_numpy(np.broadcast_to(np.int8(0), n).copy()), holders
        )
        for i, n in enumerate(sizes)
    ]
    shares = [assign_writes(reversed(chunks), rank) for rank in holders]
    loads = [sum(chunk.flat.nbytes for chunk in share) for share in shares]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= 2 << 20  # whole small chunks, at most one too many at either end
    pieces = sorted((chunk.name, chunk.range) for share in shares for chunk in share)
    assert all(a[0] != b[0] or a[1][1] == b[1][0] for a, b in itertools.pairwise(pieces))


def test_every_element_must_be_stored_once() -> None:
    check_complete(catalogue(("a", (6,), (0, 4), F32), ("a", (6,), (4, 6), F32)))
    with pytest.raises(BrokenCheckpoint, match="file0: elements of a are also in file1"):
        check_complete(catalogue(("a", (6,), (0, 4), F32), ("a", (6,), (3, 6), F32)))
    with pytest.raises(BrokenCheckpoint, match="1 elements of a are in no file"):
        check_complete(catalogue(("a", (6,), (0, 4), F32), ("a", (6,), (5, 6), F32)))
    with pytest.raises(BrokenCheckpoint, match=r"a has shape \(7,\) and elsewhere \(6,\)"):
        check_complete(catalogue(("a", (6,), (0, 4), F32), ("a", (7,), (4, 7), F32)))


def test_wanted_chunks_are_found_by_name() -> None:
    stored = catalogue(("a", (4,), (0, 4), F32))
    matching = match([make_chunk("a", (4,)), make_chunk("b", (4,))], stored)
    assert [source for _, source in matching.sources] == ["a"] and matching.missing == {"b"} and matching.used == {"a"}
    with pytest.raises(UserError, match=r"a has shape \[5\] in this run and \[4\] in the checkpoint"):
        match([make_chunk("a", (5,))], stored)


def test_weights_and_main_weights_replace_each_other() -> None:
    main = optimizer_state_name("param", "w")
    both = catalogue(("w", (4,), (0, 4), BF16), (main, (4,), (0, 4), F32))
    matching = match([make_chunk("w", (4,))], both)
    assert [source for _, source in matching.sources] == [main] and matching.used == {"w", main}
    assert [source for _, source in match([make_chunk("w", (4,), dtype=BF16)], both).sources] == ["w"]
    weights = catalogue(("w", (4,), (0, 4), F32))
    matching = match([make_chunk(main, (4,))], weights)
    assert [source for _, source in matching.sources] == ["w"] and matching.notes


def test_blocks_are_read_once_in_their_order_on_disk() -> None:
    stored = catalogue(("a", (6,), (0, 4), F32), ("a", (6,), (4, 6), F32))
    wanted = [make_chunk("a", (6,), flat_range=(3, 6)), make_chunk("a", (6,), flat_range=(0, 4))]
    reads = plan_reads([(chunk, "a") for chunk in wanted], stored)
    assert [read.source.data_file for read in reads] == ["file0", "file1"]
    assert [sum(overlap.numel for _, overlap in read.copies) for read in reads] == [1 + 4, 2]
    with pytest.raises(BrokenCheckpoint, match=r"4 elements of .* are stored, 6 are wanted"):
        plan_reads([(make_chunk("a", (6,)), "a")], catalogue(("a", (6,), (0, 4), F32)))


def test_patterns_allow_keys_to_be_missing() -> None:
    policy = MismatchPolicy(patterns=("opt.*",), silent=("rng.?",))
    assert [policy.allows(name) for name in ("opt.x", "rng.1", "rng.10", "w")] == [True, True, False, False]
    assert [policy.is_silent(name) for name in ("opt.x", "rng.1")] == [False, True]


def test_names_for_messages_and_flags() -> None:
    assert describe_names("ba") == "a, b"
    assert describe_names(map(str, range(12)), limit=2) == "0, 1 and 10 more"
    assert used_flags(["a", "b", "c"], {"c", "a"}).tolist() == [1, 0, 1]
