"""Scores of the lightning indexer on a GPU: a program computes a tile of scores and walks over the heads, so products
of single heads are never kept."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.attention.flash_forward_triton import VECTOR
from megatron.core.ops.attention.indexer import index_scores
from megatron.core.ops.tiles import cdiv, next_power_of_2

_TILE = 128
"""Queries and keys of a program."""


@triton.jit
def _index_scores_kernel(  # type: ignore[no-untyped-def]
    scores, query, key, weight, queries, keys, heads, width, query_row, query_batch, query_head, key_row, key_batch,
    weight_row, weight_batch, weight_head, RELU: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    i = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    j = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside = (i < queries)[:, None] & (channel < width)[None, :]
    at = key + batch * key_batch + j[:, None] * key_row + channel[None, :]
    k = tl.load(at, mask=(j < keys)[:, None] & (channel < width)[None, :], other=0.0)
    total = tl.zeros((TILE, TILE), tl.float32)
    for head in range(heads):
        q = tl.load(
            query + batch * query_batch + i[:, None] * query_row + head * query_head + channel[None, :],
            mask=inside, other=0.0,
        )  # fmt: skip
        product = tl.dot(q, tl.trans(k), input_precision="ieee")
        if RELU:
            product = tl.where(product < 0.0, 0.0, product)  # keeps NaN
        factor = tl.load(
            weight + batch * weight_batch + i * weight_row + head * weight_head, mask=i < queries, other=0.0
        )
        total += product * factor.to(tl.float32)[:, None]
    at = scores + (batch * queries + i[:, None]) * keys + j[None, :]
    tl.store(at, total, mask=(i < queries)[:, None] & (j < keys)[None, :])


def index_scores_triton(query: Tensor, key: Tensor, weight: Tensor, relu: bool = True) -> Tensor:
    """Computes `indexer.index_scores` without gradients. Float64, and heads whose channels do not divide by `VECTOR`,
    use the definition."""
    if query.element_size() == 8 or query.shape[3] % VECTOR:
        return index_scores(query, key, weight, relu)
    query, key = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (query, key))
    sq, b, heads, width = query.shape
    scores = query.new_empty(b, sq, key.shape[0], dtype=torch.float32)
    _index_scores_kernel[(cdiv(sq, _TILE), cdiv(key.shape[0], _TILE), b)](
        scores, query, key, weight, sq, key.shape[0], heads, width, *query.stride()[:3], *key.stride()[:2],
        *weight.stride(), RELU=relu, TILE=_TILE, WIDTH=max(16, next_power_of_2(width)), num_warps=8, num_stages=3,
    )  # fmt: skip
    return scores
