"""Which experts ranks swap, and where their rows then are, against loops."""

import dataclasses

import pytest
import torch

from megatron.core.ops.moe.placement import balanced_homes, place_experts


def loads(rows: list[list[int]], homes: list[list[int]]) -> list[int]:
    return [sum(rows[home][slot] for slot, home in enumerate(own)) for own in homes]


def test_the_fullest_rank_swaps_an_expert_with_the_emptiest() -> None:
    rows = [[500, 300, 60, 20], [40, 30, 40, 10]]
    homes = balanced_homes(rows)
    assert homes == [[1, 0, 0, 0], [0, 1, 1, 1]]
    assert loads(rows, homes) == [420, 580]


def test_three_ranks_become_equal() -> None:
    rows = [[600, 500, 400], [20, 30, 10], [50, 10, 30]]
    homes = balanced_homes(rows)
    for slot in range(3):  # only experts of the same slot are swapped
        assert sorted(own[slot] for own in homes) == [0, 1, 2]
    assert max(loads(rows, homes)) < 1.2 * sum(map(sum, rows)) / 3


@pytest.mark.parametrize("rows", [[[5, 5], [5, 5]], [[0, 0], [0, 0]], [[1000, 1000], [995, 996]], [[7, 0], [0, 7]]])
def test_nothing_is_swapped_without_a_gain(rows: list[list[int]]) -> None:
    assert balanced_homes(rows) == [[0, 0], [1, 1]]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_table_has_the_place_of_every_row(rank: int) -> None:
    counts = torch.tensor([[300, 200, 40, 10, 20, 10, 30, 5], [200, 100, 20, 10, 20, 20, 10, 5]])  # [sources, experts]
    table, experts = place_experts(counts, [[1, 0, 0, 0], [0, 1, 1, 1]], rank), [4, 1, 2, 3, 0, 5, 6, 7]
    assert table.expert.tolist() == experts
    assert [experts[position] for position in table.position.tolist()] == list(range(8))
    assert torch.equal(table.of_sources, counts[:, experts])
    row, own = 0, experts[4 * rank : 4 * rank + 4]
    for slot, expert in enumerate(own):
        assert table.first[expert] == row and table.counts[slot] == counts[:, expert].sum()
        row += int(table.counts[slot])
    assert all(table.first[expert] == -1 for expert in range(8) if expert not in own)
    copied = table.to(torch.device("cpu"))
    for field in dataclasses.fields(table):
        assert torch.equal(getattr(copied, field.name), getattr(table, field.name))
