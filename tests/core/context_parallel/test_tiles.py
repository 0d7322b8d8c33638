"""Tiles of queries and keys: small cases by hand."""

from megatron.core.context_parallel.tiles import (
    Span,
    joined,
    own_tiles,
    rows_seen,
    spans_of,
    tile_of,
    tiles_between,
    with_keys_from,
)
from megatron.core.ops.attention.blocks import BlockOffsets
from megatron.core.tokens import SequencePart

CAUSAL = (None, 0)


def test_a_rank_holds_two_chunks() -> None:
    assert spans_of(SequencePart(1, 4), 5) == (Span(0, 5, 5), Span(5, 30, 5))


def test_a_tile_is_no_larger_than_needed() -> None:
    assert tile_of(Span(0, 0, 4), Span(0, 4, 4), CAUSAL) is None
    earlier = tile_of(Span(0, 4, 4), Span(0, 0, 4), CAUSAL)
    assert earlier is not None and earlier.whole and earlier.pairs == 16
    windowed = tile_of(Span(0, 4, 4), Span(0, 0, 4), (2, 0))  # query 4 sees 2 and 3, query 5 sees 3
    assert windowed is not None and windowed.pairs == 3
    assert (windowed.queries, windowed.keys) == (slice(0, 2), slice(2, 4))
    assert windowed.offsets == BlockOffsets(4, 2, 0, None)


def test_tiles_of_a_causal_row_join_into_one() -> None:
    part = SequencePart(1, 2)
    assert len(own_tiles(part, 3, CAUSAL, join=True)) == 1
    apart = own_tiles(part, 3, CAUSAL, join=False)
    assert sum(tile.pairs for tile in apart) == own_tiles(part, 3, CAUSAL, join=True)[0].pairs == 21
    tiles = tiles_between(part, 0, 1, 3, CAUSAL, join=False)
    assert len(joined(tiles)) == 1 and sum(tile.pairs for tile in joined(tiles)) == sum(tile.pairs for tile in tiles)


def test_only_the_rows_that_are_seen_are_fetched() -> None:
    tiles = tiles_between(SequencePart(1, 8), 1, 0, 100, (10, 0), join=True)
    assert rows_seen(tiles) == slice(90, 100)
    assert [tile.keys for tile in with_keys_from(tiles, 90)] == [slice(0, 10)]
    assert rows_seen([]) == slice(0, 0)
