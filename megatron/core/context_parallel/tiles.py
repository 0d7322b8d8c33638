"""Which queries and keys of a split row meet, in rectangles that a kernel computes one at a time: pure integers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron.core.ops.attention.blocks import BlockOffsets
from megatron.core.tokens import SequencePart

Reach = tuple[int | None, int | None]
"""How many keys a query sees to its left and right, `AttentionVariant.reach`; None: all."""


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of a row, and the rows of a tensor that hold them."""

    first_row: int
    place: int
    """Where in the row of tokens the first one stands."""
    count: int


@dataclass(frozen=True)
class Tile:
    """A rectangle of queries and keys: every query sees a key, and every key is seen."""

    queries: slice
    """Rows of this rank's queries."""
    keys: slice
    """Rows of the keys at hand."""
    place: BlockOffsets

    @property
    def whole(self) -> bool:
        """Every query sees every key."""
        return self.place.left is None and self.place.right is None

    @property
    def pairs(self) -> int:
        """Number of pairs that meet."""
        sq, sk = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        left, right = self.place.left, self.place.right
        return sum(
            min(sk, sk if right is None else i + right + 1) - max(0, 0 if left is None else i - left) for i in range(sq)
        )


def spans_of(part: SequencePart, chunk: int, rank: int | None = None) -> tuple[Span, Span]:
    """The two chunks of `chunk` tokens that a rank (default: this one) holds."""
    first, second = part.chunks(rank)
    return Span(0, first * chunk, chunk), Span(chunk, second * chunk, chunk)


def tile_of(queries: Span, keys: Span, reach: Reach) -> Tile | None:
    """The smallest rectangle that holds all pairs that meet; None: there is none."""
    left, right = reach
    offset = keys.place - queries.place
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
    return Tile(
        slice(queries.first_row + first_query, queries.first_row + end_query),
        slice(keys.first_row + first_key, keys.first_row + end_key),
        BlockOffsets(queries.place + first_query, keys.place + first_key, left, right),
    )


def tiles_of(queries: Iterable[Span], keys: Sequence[Span], reach: Reach) -> list[Tile]:
    """All tiles of some queries and some keys."""
    found = [tile_of(query_span, key_span, reach) for query_span in queries for key_span in keys]
    return [tile for tile in found if tile is not None]


def joined(tiles: Sequence[Tile]) -> tuple[Tile, ...]:
    """Fewer and larger tiles for the same pairs: for kernels that do not ask where in the row a token stands, since the
    parts of a joined tile need not be consecutive there."""
    done: list[Tile] = []
    for tile in tiles:
        for number, other in enumerate(done):
            larger = _join(other, tile)
            if larger is not None:
                done[number] = larger
                break
        else:
            done.append(tile)
    return tuple(done) if len(done) == len(tiles) else joined(done)


def _join(first: Tile, second: Tile) -> Tile | None:
    """Two rectangles without limits that lie beside or below each other."""
    if not (first.whole and second.whole):
        return None
    if first.keys == second.keys and first.queries.stop == second.queries.start:
        return replace(first, queries=slice(first.queries.start, second.queries.stop))
    if first.queries == second.queries and first.keys.stop == second.keys.start:
        return replace(first, keys=slice(first.keys.start, second.keys.stop))
    return None


def own_tiles(part: SequencePart, chunk: int, reach: Reach, join: bool) -> tuple[Tile, ...]:
    """The tiles of a rank's queries with its own keys."""
    if join and reach == (None, 0):  # causal over the row is causal over the two chunks as they lie
        spans = spans_of(part, chunk)
        rows = slice(0, 2 * chunk)
        return (Tile(rows, rows, BlockOffsets(spans[0].place, spans[0].place, None, 0)),)
    return tiles_between(part, part.rank, part.rank, chunk, reach, join)


def tiles_between(
    part: SequencePart, queries: int, keys: int, chunk: int, reach: Reach, join: bool
) -> tuple[Tile, ...]:
    """The tiles of one rank's queries with another's keys."""
    tiles = tiles_of(spans_of(part, chunk, queries), spans_of(part, chunk, keys), reach)
    return joined(tiles) if join else tuple(tiles)


def rows_seen(tiles: Iterable[Tile]) -> slice:
    """The rows of the keys at hand that some tile needs, as one range; an empty one where there is no tile."""
    rows = [tile.keys for tile in tiles]
    return slice(min((r.start for r in rows), default=0), max((r.stop for r in rows), default=0))


def with_keys_from(tiles: Iterable[Tile], first: int) -> tuple[Tile, ...]:
    """The same tiles, where the keys at hand begin with row `first`."""
    return tuple(replace(tile, keys=slice(tile.keys.start - first, tile.keys.stop - first)) for tile in tiles)
