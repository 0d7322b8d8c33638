"""The order in which programs add gradients of queries, computed without a GPU."""

import random

import pytest
import torch

from megatron.core.ops.attention import flash_backward_specialized_triton as kernels
from megatron.core.ops.attention.flash_forward_triton import Sight
from megatron.core.ops.attention.flash_triton import edges_of_documents

CPU = torch.device("cpu")
KEYS = kernels.TILE_KEYS


def walk(sight: Sight, queries: int, keys: int, n: int, size: int) -> range:
    """The tiles of queries that `_find_walk` finds for the program of the keys from n on."""
    behind, first, last = min(n + KEYS, keys), 0, queries
    if sight.right is not None:
        first = max(0, n - sight.right)
    if sight.left is not None:
        last = min(last, behind + sight.left)
    if sight.edges is not None:
        first = max(first, int(sight.edges[0, n]))
        last = min(last, int(sight.edges[1, behind - 1]))
    return range(first // size, first // size + -(-max(last - first // size * size, 0) // size))


def random_sight(choose: random.Random, rows: int) -> Sight:
    left = choose.choice([None, 0, choose.randint(1, rows)])
    if choose.random() < 0.5:
        return Sight(0, 0, left, choose.choice([None, 0, choose.randint(-rows, rows)]))
    cuts = [0, *sorted(choose.randint(0, rows) for _ in range(6)), rows]
    return Sight(0, 0, left, 0, edges_of_documents(torch.tensor(cuts, dtype=torch.int32), rows))


@pytest.mark.parametrize("size", [64, 128])
def test_each_program_that_adds_to_a_tile_gets_its_turn(size: int) -> None:
    """Programs begin in the order of their keys. Each passes a turn on to the next tile of keys."""
    choose, added = random.Random(size), 0
    for _ in range(100):
        rows = choose.randint(1, 1500)
        sight = random_sight(choose, rows)
        turns = kernels._turns(sight, rows, rows, size, 1, CPU)[2:].view(-1, 2)
        for tile in range(-(-rows // KEYS)):
            for m in walk(sight, rows, rows, tile * KEYS, size):
                assert turns[m].tolist() == [tile, tile], (sight, rows, m)
                turns[m] += 1
                added += 1
    assert added > 1000
