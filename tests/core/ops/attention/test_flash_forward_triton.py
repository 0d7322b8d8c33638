"""The forward kernel of our own flash attention, in Triton's interpreter."""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.ops.attention.flash_forward_triton import (
    Scores,
    Sight,
    TileSize,
    aligned_heads,
    flash_forward_triton,
    padded_heads,
    words_of_head,
)


def test_the_lse_counts_the_sink_and_queries_without_keys_get_zeros() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(20, 1, 2, 16, generator=generator) for _ in range(3))
    sink = torch.tensor([0.5, -1.0])
    sight = Sight(0, 0, left=None, right=-6)  # queries 0 to 5 see nothing
    seen = torch.arange(20) <= torch.arange(20)[:, None] - 6
    scores = (0.3 * torch.einsum("ibad,jbad->baij", query, key)).masked_fill(~seen, -torch.inf)
    for extra in (None, sink):
        output, lse = flash_forward_triton(
            query, key, value, extra, Scores(0.3), sight, None, 0.0, TileSize(16, 16, 4, 1)
        )
        expected = torch.logsumexp(scores, -1)
        if extra is not None:
            expected = torch.logaddexp(expected, extra[None, :, None])
        assert not output[:6].any() and torch.equal(lse.isinf(), expected.isinf())
        assert (lse - expected).masked_fill(lse.isinf(), 0.0).abs().max() < 1e-6
        weights = torch.exp(scores - expected[..., None])[..., 6:, :]
        assert (output[6:] - torch.einsum("baij,jbad->ibad", weights, value)).abs().max() < 1e-6


def test_threads_can_load_vectors_of_all_heads() -> None:
    packed = torch.randn(6, 2, 96)
    whole = packed[..., :64].unflatten(2, (2, 32))
    assert padded_heads(whole) is whole and aligned_heads(whole) is whole
    places = {
        "rows of 88 channels": torch.randn(6, 1, 88)[..., 72:].unflatten(2, (1, 16)),
        "rows that begin at 2 bytes": torch.randn(6 * 96 + 1)[1:].view(6, 1, 2, 48),
        "channels that are no neighbours": torch.randn(6, 1, 16, 2).transpose(2, 3),
        "one row repeated": torch.randn(17)[1:].expand(6, 1, 2, 16),
    }
    for place, heads in places.items():
        found = aligned_heads(heads)
        assert torch.equal(found, heads) and found.is_contiguous() and found.data_ptr() % 16 == 0, place
    odd = padded_heads(whole[..., :20])
    assert odd.shape[3] == 32 and torch.equal(odd[..., :20], whole[..., :20]) and not odd[..., 20:].any()


@triton.jit
def _words_kernel(found: Any, queries: Any, keys: Any) -> None:
    tl.store(found, words_of_head(queries, keys))


def test_words_of_dropout_in_a_head_may_be_more_than_32_bits_count() -> None:
    found = torch.zeros((), dtype=torch.int64)
    for queries, keys, words in ((1, 129, 128 * 2 * 4), (2**18, 2**18, 2**31)):
        _words_kernel[(1,)](found, queries, keys)
        assert found.item() == words
