"""Rows ahead, over ranks and documents, against a loop over tokens."""

import pytest
import torch
from support.pool import Pool
from torch import Tensor

from megatron.core.context_parallel.mtp_shift import shifted_rows
from megatron.core.context_parallel.splitting import cut_rows, sequence_part
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.tokens import Tokens

LENGTH, ROWS = 24, 3
PACKED = [0, 5, 6, 13, 24]


def numbers(rows: int) -> list[Tensor]:
    """Three kinds of numbers, none of them zero."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 2**40, (rows, LENGTH), generator=generator)
    mask = torch.rand(rows, LENGTH, generator=generator) + 0.1
    return [ids, mask, mask.double() * 3]


def by_hand(row: Tensor, depth: int, boundaries: list[int]) -> Tensor:
    """One token after the other."""
    expected = torch.zeros_like(row)
    for place in range(LENGTH):
        end = min(boundary for boundary in boundaries if boundary > place)
        if place + depth < end:
            expected[:, place] = row[:, place + depth]
    return expected


def on_a_rank(size: int, depths: int, packed: bool) -> None:
    rank = torch.distributed.get_rank() if size > 1 else 0
    groups = ProcessGroupCollection.from_grid(RankGrid(size, context=size), rank)
    part = sequence_part(groups)
    rows, boundaries = (1, PACKED) if packed else (ROWS, [0, LENGTH])
    tokens = Tokens(
        LENGTH // size,
        rows,
        part,
        cu_seqlens=torch.tensor(PACKED, dtype=torch.int32) if packed else None,
        max_seqlen=11,
    )
    whole = numbers(rows)
    held = whole if part is None else [cut_rows(row, part, 1) for row in whole]
    found = shifted_rows(held, depths, tokens, groups.cp)
    assert len(found) == depths
    for depth, ahead in enumerate(found, 1):
        for row, values in zip(whole, ahead, strict=True):
            expected = by_hand(row, depth, boundaries)
            expected = expected if part is None else cut_rows(expected, part, 1)
            assert values.dtype is row.dtype and torch.equal(values, expected), (depth, row.dtype)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("depths", [1, 2, 7, 26])
def test_one_rank(depths: int, packed: bool) -> None:
    on_a_rank(1, depths, packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("depths", [1, 2, 7, 26])
@pytest.mark.parametrize("size", [2, 4])
def test_over_ranks(size: int, depths: int, packed: bool, pool: Pool) -> None:
    """Chunks of 6 and 3 tokens: some depths reach across several."""
    pool.run(on_a_rank, size, size, depths, packed)
