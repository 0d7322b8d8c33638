"""Rectangles (tiles) of queries and keys of a split row that a kernel computes one at a time, as pure integers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron.core.ops.attention.blocks import BlockOffsets
from megatron.core.tokens import SequencePart

Reach = tuple[int | None, int | None]
"""Number of keys that a query sees to its left and right (`AttentionVariant.reach`); None: all."""


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of a row, and the rows of a tensor that hold them."""

    first_row: int
    position: int
    """Position of the first token in the row."""
    count: int


@dataclass(frozen=True)
class QueryKeyTile:
    """A rectangle of queries and keys. Each query sees at least one key, and each key is seen by at least one query."""

    queries: slice
    """Rows of this rank's queries."""
    keys: slice
    """Rows of the fetched keys."""
    offsets: BlockOffsets

    @property
    def whole(self) -> bool:
        """Whether every query sees every key."""
        return self.offsets.left is None and self.offsets.right is None

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that it sees."""
        sq, sk = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        left, right = self.offsets.left, self.offsets.right
        return sum(
            min(sk, sk if right is None else i + right + 1) - max(0, 0 if left is None else i - left) for i in range(sq)
        )


def spans_of(part: SequencePart, chunk: int, rank: int | None = None) -> tuple[Span, Span]:
    """Returns the two chunks of `chunk` tokens that a rank (default: this one) holds."""
    first, second = part.chunks(rank)
    return Span(0, first * chunk, chunk), Span(chunk, second * chunk, chunk)


def tile_of(queries: Span, keys: Span, reach: Reach) -> QueryKeyTile | None:
    """Returns the smallest tile with all pairs of a query and a key that it sees; None if there is no such pair."""
    left, right = reach
    offset = keys.position - queries.position
    right = None if right is None else right - offset  # query i sees key j, both counted in their spans, if
    left = None if left is None else left + offset  # i - left <= j <= i + right
    first_query = 0 if right is None else max(0, -right)
    end_query = queries.count if left is None else min(queries.count, keys.count + left)
    first_key = 0 if left is None else max(0, -left)
    end_key = keys.count if right is None else min(keys.count, queries.count + right)
    if first_query >= end_query or first_key >= end_key:
        return None
    moved = first_key - first_query
    right = None if right is None or right - moved >= end_key - first_key - 1 else right - moved
    left = None if left is None or left + moved >= end_query - first_query - 1 else left + moved
    return QueryKeyTile(
        slice(queries.first_row + first_query, queries.first_row + end_query),
        slice(keys.first_row + first_key, keys.first_row + end_key),
        BlockOffsets(queries.position + first_query, keys.position + first_key, left, right),
    )


def tiles_of(queries: Iterable[Span], keys: Sequence[Span], reach: Reach) -> list[QueryKeyTile]:
    """Returns all tiles of some queries and some keys."""
    found = [tile_of(query_span, key_span, reach) for query_span in queries for key_span in keys]
    return [tile for tile in found if tile is not None]


def joined(tiles: Sequence[QueryKeyTile]) -> tuple[QueryKeyTile, ...]:
    """Joins tiles into fewer and larger ones with the same pairs.

    Only for kernels that do not need a token's position in the row, because the parts of a joined tile may not be
    consecutive in the row.
    """
    done: list[QueryKeyTile] = []
    for tile in tiles:
        for number, other in enumerate(done):
            larger = _join(other, tile)
            if larger is not None:
                done[number] = larger
                break
        else:
            done.append(tile)
    return tuple(done) if len(done) == len(tiles) else joined(done)


def _join(first: QueryKeyTile, second: QueryKeyTile) -> QueryKeyTile | None:
    """Joins two full tiles that are adjacent in one dimension; None if they are not."""
    if not (first.whole and second.whole):
        return None
    if first.keys == second.keys and first.queries.stop == second.queries.start:
        return replace(first, queries=slice(first.queries.start, second.queries.stop))
    if first.queries == second.queries and first.keys.stop == second.keys.start:
        return replace(first, keys=slice(first.keys.start, second.keys.stop))
    return None


def own_tiles(part: SequencePart, chunk: int, reach: Reach, join: bool) -> tuple[QueryKeyTile, ...]:
    """Returns the tiles of a rank's queries with its own keys."""
    if join and reach == (None, 0):  # causal over the row is also causal over the rank's two chunks
        spans = spans_of(part, chunk)
        rows = slice(0, 2 * chunk)
        return (QueryKeyTile(rows, rows, BlockOffsets(spans[0].position, spans[0].position, None, 0)),)
    return tiles_between(part, part.rank, part.rank, chunk, reach, join)


def tiles_between(
    part: SequencePart, queries: int, keys: int, chunk: int, reach: Reach, join: bool
) -> tuple[QueryKeyTile, ...]:
    """Returns the tiles of one rank's queries with another rank's keys."""
    tiles = tiles_of(spans_of(part, chunk, queries), spans_of(part, chunk, keys), reach)
    return joined(tiles) if join else tuple(tiles)


def rows_seen(tiles: Iterable[QueryKeyTile]) -> slice:
    """Returns the range of fetched key rows that the tiles need; empty if there are no tiles."""
    rows = [tile.keys for tile in tiles]
    return slice(min((r.start for r in rows), default=0), max((r.stop for r in rows), default=0))


def with_keys_from(tiles: Iterable[QueryKeyTile], first: int) -> tuple[QueryKeyTile, ...]:
    """Returns the tiles for fetched keys that begin with row `first`."""
    return tuple(replace(tile, keys=slice(tile.keys.start - first, tile.keys.stop - first)) for tile in tiles)
