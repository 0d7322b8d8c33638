"""Relative position bias of attention scores (Raffel et al. 2020, "Exploring the limits of transfer learning", T5).

A score gets a learned number that depends on the head and on the distance from query to key. Distances share numbers in
buckets: near distances have a bucket each, farther ones share buckets whose width grows with the logarithm.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.ops.embedding import embedding
from megatron.core.ops.precision import widened


def relative_position_buckets(distance: Tensor, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """Returns the bucket of each distance (position of the key minus position of the query): int64, in the shape given.

    With `bidirectional` the upper half of the buckets is for keys to the right. Otherwise these share bucket 0 with the
    query itself. Distances of `max_distance` and more share the last bucket of their side.
    """
    table = _buckets_of_one_side(num_buckets // 2 if bidirectional else num_buckets, max_distance)
    table = table.to(distance.device)
    to_left = distance.neg().clamp(0, len(table) - 1)
    if not bidirectional:
        return table[to_left]
    to_right = distance.clamp(0, len(table) - 1)
    return torch.where(distance > 0, table[to_right] + num_buckets // 2, table[to_left])


def relative_position_bias(
    table: Tensor,
    queries: int,
    keys: int,
    *,
    bidirectional: bool,
    max_distance: int,
    first_query: int = 0,
    lookup: Callable[[Tensor, Tensor], Tensor] = embedding,
) -> Tensor:
    """Returns the bias [1, heads, queries, keys] for a table of numbers [buckets, heads].

    Queries stand at the positions `first_query`, `first_query` + 1, ... of the keys. Only the distinct distances are
    looked up, with `lookup(index, table)`; the bias is made of them once, for all layers. The gradients of the pairs at
    a distance, and of the distances in a bucket, are added in float32 at least.
    """
    distance = torch.arange(keys + queries - 1, device=table.device) - (queries - 1) - first_query
    buckets = relative_position_buckets(distance, bidirectional, table.shape[0], max_distance)
    by_distance = lookup(buckets, widened(table)).t()  # [heads, queries + keys - 1]
    # A window of `keys` neighbours is a row of the bias; the first window belongs to the last query.
    return by_distance.unfold(1, keys, 1).flip(1)[None].to(table.dtype)


@functools.cache
def _buckets_of_one_side(num_buckets: int, max_distance: int) -> Tensor:
    """Returns the bucket of each distance from 0 to `max_distance`. Computed in float32 on the CPU, as in T5's first
    code: elsewhere a logarithm may be rounded to another bucket."""
    exact = num_buckets // 2
    distance = torch.arange(max_distance + 1, device="cpu")
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    larger = exact + (share * (num_buckets - exact)).to(torch.int64)
    return torch.where(distance < exact, distance, larger.clamp(max=num_buckets - 1))
