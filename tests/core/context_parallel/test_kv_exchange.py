"""Steps of the exchanges: every pair of a query and a key is in exactly one tile, and ranks have equal work."""

import itertools

import pytest

from megatron.core.context_parallel.kv_exchange import Ring, ring_steps
from megatron.core.context_parallel.tiles import QueryKeyTile, Reach, own_tiles, tiles_between
from megatron.core.tokens import SequencePart, Tokens, row_index

CHUNK = 3
REACHES: list[Reach] = [(None, 0), (None, None), (0, 0), (2, 0), (4, 0), (7, 0), (None, 2), (5, None), (4, 3), (1, 8)]


def pairs(tile: QueryKeyTile, queries: list[int], keys: list[int]) -> list[tuple[int, int]]:
    """Returns the positions in the row of a tile's pairs, given the positions of its queries and keys."""
    found = []
    for i, query in enumerate(queries[tile.queries]):
        for j, key in enumerate(keys[tile.keys]):
            left, right = tile.offsets.left, tile.offsets.right
            if (left is None or j >= i - left) and (right is None or j <= i + right):
                found.append((query, key))
    assert len(found) == tile.pairs
    assert {query for query, _ in found} == set(queries[tile.queries])  # no tile is larger than needed
    assert {key for _, key in found} == set(keys[tile.keys])
    return found


def visible(size: int, reach: Reach) -> list[tuple[int, int]]:
    left, right = reach
    row = range(2 * size * CHUNK)
    return [
        (i, j)
        for i, j in itertools.product(row, row)
        if (left is None or j >= i - left) and (right is None or j <= i + right)
    ]


def held(size: int, rank: int) -> list[int]:
    return row_index(Tokens(2 * CHUNK, 1, SequencePart(rank, size))).tolist()


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_computes_every_pair_once(size: int, reach: Reach, join: bool) -> None:
    found, distances = [], set()
    for rank in range(size):
        ring = Ring(SequencePart(rank, size), None, CHUNK, reach, join)
        distances.add(tuple(step.distance for step in ring.ring_steps))
        for step in ring.ring_steps:
            source = (rank - step.distance) % size
            keys = held(size, source)
            found += [
                pair
                for tile in step.tiles
                for pair in pairs(tile, held(size, rank), keys[step.fetched] if step.distance else keys)
            ]
            if step.distance:  # a rank fetches what the other rank sends
                theirs = ring_steps(SequencePart(source, size), CHUNK, reach, join)
                assert next(t.given for t in theirs if t.distance == step.distance) == step.fetched
    assert sorted(found) == visible(size, reach)
    assert len(distances) == 1


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_have_equal_work(size: int) -> None:
    """In every step of a ring under a causal mask."""
    for steps in zip(*(ring_steps(SequencePart(r, size), CHUNK, (None, 0), True) for r in range(size)), strict=True):
        assert len({sum(tile.pairs for tile in step.tiles) for step in steps}) == 1
        assert all(len(step.tiles) == 1 for step in steps)  # one launch


def test_steps_without_work_are_left_out() -> None:
    """With a window shorter than a chunk only neighbours exchange keys, and only those that the window reaches."""
    steps = ring_steps(SequencePart(2, 8), 100, (10, 0), True)
    assert [step.distance for step in steps] == [0, 1, 7]
    assert [step.fetched for step in steps] == [slice(0, 0), slice(90, 100), slice(190, 200)]
    middle = ring_steps(SequencePart(7, 8), 100, (10, 0), True)
    assert middle[0].tiles == own_tiles(SequencePart(7, 8), 100, (10, 0), True) and len(middle[0].tiles) == 3


def test_half_of_the_keys_of_earlier_ranks_are_not_needed() -> None:
    steps = ring_steps(SequencePart(1, 4), CHUNK, (None, 0), True)
    assert [step.fetched.stop - step.fetched.start for step in steps[1:]] == [CHUNK, 2 * CHUNK, 2 * CHUNK]
    assert tiles_between(SequencePart(1, 4), 1, 3, CHUNK, (None, 0), True)[0].queries == slice(CHUNK, 2 * CHUNK)
