"""The zig-zag: what each rank holds, positions and places of dropout, and the way back to the row."""

import pytest
import torch

from megatron.core.context_parallel.splitting import cut_rows, in_natural_order, in_rank_order, sequence_part
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.ops.dropout.dropout import dropout_tokens
from megatron.core.tokens import RngPosition, SequencePart, Tokens, position_ids, row_index
from megatron.training.data.batch import Batch

SIZES = [2, 3, 4]


@pytest.mark.parametrize("size", SIZES)
def test_parts_are_a_row(size: int) -> None:
    row = torch.arange(12 * size).view(-1, 2) + 100
    parts = [cut_rows(row, SequencePart(rank, size), 0) for rank in range(size)]
    assert parts[0][:, 0].tolist() == [100, 102, 104, *(100 + 2 * (6 * size - i) for i in (3, 2, 1))]
    assert torch.equal(in_natural_order(torch.cat(parts), size), row)
    assert torch.equal(in_rank_order(row, size), torch.cat(parts))
    for rank, part in enumerate(parts):
        tokens = Tokens(6, 1, SequencePart(rank, size))
        assert torch.equal(row[row_index(tokens)], part)


def test_rows_that_do_not_divide() -> None:
    with pytest.raises(UserError, match=r"rows of 10 tokens \(seq_length\) .* context_parallel_size 2; use 8 or 12"):
        cut_rows(torch.zeros(2, 10), SequencePart(0, 2), 1)


def test_part_of_a_rank() -> None:
    grid = RankGrid(8, tensor=2, context=4)
    parts = [sequence_part(ProcessGroupCollection.from_grid(grid, rank)) for rank in range(8)]
    assert parts == [SequencePart(rank // 2, 4) for rank in range(8)]
    assert sequence_part(ProcessGroupCollection.from_grid(RankGrid(8, tensor=2), 5)) is None


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(1, 99, (3, 8), generator=generator) for _ in range(2))
    return Batch(
        tokens=tokens,
        labels=labels,
        loss_mask=torch.rand(3, 8, generator=generator),
        position_ids=torch.arange(8).expand(3, 8),
        attention_mask=torch.rand(3, 1, 8, 8, generator=generator) < 0.5,
    )


@pytest.mark.parametrize("rank, held", [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])])
def test_part_of_a_batch(rank: int, held: list[int]) -> None:
    whole = batch()
    part = whole.part(SequencePart(rank, 2))
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(part[name], whole[name][:, held])
    assert torch.equal(part.attention_mask, whole.attention_mask[:, :, held])
    assert whole.part(None) is whole


def test_positions_in_packed_documents() -> None:
    cu_seqlens = torch.tensor([0, 1, 5, 5, 8], dtype=torch.int32)
    found = [position_ids(Tokens(4, 1, SequencePart(rank, 2), cu_seqlens=cu_seqlens)).tolist() for rank in range(2)]
    assert found == [[[0, 0, 1, 2]], [[1, 2, 3, 0]]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sample_length", [None, 5])
def test_a_token_has_one_index_in_every_layout(size: int, sample_length: int | None) -> None:
    """Masks of hidden states are functions of it."""
    place, cpu = RngPosition(7, 3, first_sample=4), torch.device("cpu")
    whole = dropout_tokens(Tokens(6 * size, 2, sample_length=sample_length, random=place), cpu).index
    for rank in range(size):
        part = SequencePart(rank, size)
        tokens = Tokens(6, 2, part, sample_length=sample_length, random=place)
        found = dropout_tokens(tokens, cpu).index
        assert torch.equal(found.view(6, 2), cut_rows(whole.view(-1, 2), part, 0))
    assert sample_length is not None or whole.unique().numel() == 12 * size
