"""Boundaries of attention's chunks, and attention in chunks against a mask."""

import itertools

import pytest
import torch

from megatron.core.ops.attention import sdpa as attention_sdpa
from megatron.core.ops.attention.alibi import alibi_slopes
from megatron.core.ops.attention.chunks import chunks_of_documents, chunks_of_row
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

CPU = torch.device("cpu")


def test_chunks_of_a_row() -> None:
    assert chunks_of_row(10, 4, CPU).tolist() == [0, 4, 8, 10]
    assert chunks_of_row(8, 4, CPU).tolist() == [0, 4, 8]
    assert chunks_of_row(3, 4, CPU).tolist() == [0, 3]


@pytest.mark.parametrize("edges", [[0, 3, 3, 12, 13], [0, 13], [0, 1, 2, 3, 4, 13], [0, 0, 0, 13, 13], list(range(14))])
@pytest.mark.parametrize("chunk", [1, 3, 4, 20])
def test_chunks_of_documents(edges: list[int], chunk: int) -> None:
    found = chunks_of_documents(torch.tensor(edges, dtype=torch.int32), 13, chunk)
    wanted = {place for first, end in itertools.pairwise(edges) for place in range(first, end, chunk)} | {13}
    assert sorted(set(found.tolist())) == sorted(wanted) and found.tolist() == sorted(found.tolist())
    assert found[0] == 0 and found[-1] == 13 and found.dtype is torch.int32


@pytest.mark.parametrize("packed", [False, True])
def test_attention_in_chunks_is_attention_under_a_mask(packed: bool) -> None:
    sizes = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "attention_dropout": 0.0, "fp64": True}
    config = TransformerConfig(attention_chunk_size=4, attention_chunk_skip_freq=2, **sizes)
    layers = [DotProductAttention(config, number, AttnMaskType.causal, "self") for number in (1, 2, 3)]
    plain = DotProductAttention(TransformerConfig(**sizes), 1, AttnMaskType.causal, "self")
    b, edges = (1, [0, 6, 7, 13]) if packed else (2, [0, 13])
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(13, b, 4, 4, dtype=torch.float64, generator=generator) for _ in range(3)]
    place = torch.arange(13)
    document = torch.bucketize(place, torch.tensor(edges[1:]), right=True)
    chunk = (place - torch.tensor(edges)[document]) // 4
    other = document[:, None] != document
    mask = (other | (chunk[:, None] != chunk))[None, None]
    cu_seqlens = torch.tensor(edges, dtype=torch.int32)
    documents = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=7, max_seqlen_kv=7) if packed else None
    for number, layer in enumerate(layers, 1):
        found = layer(*heads, packed_seq_params=documents)
        expected = plain(*heads, (other if number == 2 else mask) if packed or number != 2 else None)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14), number
    assert not torch.allclose(layers[0](*heads), layers[1](*heads))


def test_slopes() -> None:
    assert alibi_slopes(4) == (2**-2, 2**-4, 2**-6, 2**-8)
    assert alibi_slopes(3) == (2**-4, 2**-8, 2**-2)
    twelve = alibi_slopes(12)
    assert twelve[:8] == alibi_slopes(8) and twelve[8:] == alibi_slopes(16)[0:8:2]


def test_rows_side_by_side_are_laid_end_to_end_for_a_kernel_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a GPU takes one row; this one, documents in a loop, does as it does."""
    variant, calls = AttentionVariant(0.5, True, chunk=4), []

    def documents(query, key, value, edges, key_edges, longest, longest_key, *, scale, window_size, enable_gqa=False):
        assert torch.equal(edges, key_edges) and window_size == (3, 0) and longest == longest_key == 4
        calls.append(edges.tolist())
        parts = [slice(first, end) for first, end in itertools.pairwise(edges.tolist())]
        plain = AttentionVariant(scale, True)
        rows = [[heads[part, None] for heads in (query, key, value)] for part in parts]
        return torch.cat([attention(*row, plain, AttentionCall())[:, 0] for row in rows])

    monkeypatch.setattr(attention_sdpa, "_varlen_kernel", lambda: (documents, True))
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(10, 3, n, 8, dtype=torch.float64, generator=generator) for n in (4, 2, 2)]
    call = AttentionCall(cu_seqlens=chunks_of_row(10, 4, CPU), max_seqlen=4)
    found = attention_sdpa.varlen_attention(*heads, variant, call)
    assert torch.allclose(found, attention(*heads, variant, call), rtol=1e-12)
    assert calls == [[0, 4, 8, 10, 14, 18, 20, 24, 28, 30]]
