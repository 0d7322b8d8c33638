"""Which experts ranks swap, and where their rows then are, against loops."""

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
    table, experts = place_experts(counts, 2, rank), [4, 1, 2, 3, 0, 5, 6, 7]
    assert table.any_swapped and table.expert.tolist() == experts
    assert [experts[position] for position in table.position.tolist()] == list(range(8))
    assert torch.equal(table.of_sources, counts[:, experts])
    row, own = 0, experts[4 * rank : 4 * rank + 4]
    for slot, expert in enumerate(own):
        assert table.first[expert] == table.bounds[0, slot] == row
        for source in range(2):
            end = row + int(counts[source, expert])
            assert table.bounds_by_source[:, source, slot].tolist() == [row, end]
            late = slot == 0  # the swapped one
            assert table.bounds_at_home[:, source, slot].tolist() == [row, row if late else end]
            row = end
        assert table.bounds[1, slot] == row and table.counts[slot] == counts[:, expert].sum()
        begin = int(table.bounds[0, slot])
        assert table.bounds_at_home[:, 2, slot].tolist() == [begin, row if slot == 0 else begin]
    assert all(table.first[expert] == -1 for expert in range(8) if expert not in own)
    copy = table.of_copy(table.memory.clone())
    assert torch.equal(copy.bounds_at_home, table.bounds_at_home)


def test_nothing_is_late_at_home() -> None:
    table = place_experts(torch.tensor([[5, 5, 5, 5]]), 2, 1)
    assert not table.any_swapped and table.first.tolist() == [-1, -1, 0, 5]
    assert torch.equal(table.bounds_at_home[:, :1], table.bounds_by_source)
    assert torch.equal(*table.bounds_at_home[:, 1])
