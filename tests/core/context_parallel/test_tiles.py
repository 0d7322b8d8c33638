"""Tiles of queries and keys: small cases by hand. `test_kv_exchange` has those of whole rows."""

from megatron.core.context_parallel.tiles import Span, spans_of, tile_of
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
