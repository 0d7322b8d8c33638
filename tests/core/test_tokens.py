"""Positions of tokens in rows and documents, whole or split over context parallel ranks, against lists."""

import pytest
import torch

from megatron.core.tokens import SequencePart, Tokens, document_numbers, position_ids, row_index, row_lengths

CU_SEQLENS = torch.tensor([0, 3, 4, 12], dtype=torch.int32)
POSITIONS = [0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6, 7]
LENGTHS = [3, 3, 3, 1, 8, 8, 8, 8, 8, 8, 8, 8]


def test_chunks_of_all_ranks_cover_a_row_and_pair_first_with_last() -> None:
    parts = [SequencePart(rank, 3) for rank in range(3)]
    assert [part.chunks() for part in parts] == [(0, 5), (1, 4), (2, 3)]
    assert parts[0].chunks(2) == (2, 3)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_indices_of_all_ranks_cover_a_row(size: int) -> None:
    parts = [SequencePart(rank, size) for rank in range(size)] if size > 1 else [None]
    tokens = [Tokens(12 // size, 2, part) for part in parts]
    assert sorted(torch.cat([row_index(each) for each in tokens]).tolist()) == list(range(12))
    assert all((each.row_length, each.count) == (12, 24 // size) for each in tokens)
    if size == 2:
        assert row_index(tokens[0]).tolist() == [0, 1, 2, 9, 10, 11]
        assert row_index(tokens[0], rank=1).tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_positions_and_lengths_in_packed_documents(size: int) -> None:
    for rank in range(size):
        part = SequencePart(rank, size) if size > 1 else None
        tokens = Tokens(12 // size, 1, part, cu_seqlens=CU_SEQLENS, max_seqlen=8)
        index = row_index(tokens).tolist()
        assert position_ids(tokens).tolist() == [[POSITIONS[i] for i in index]]
        assert row_lengths(tokens).tolist() == [[LENGTHS[i] for i in index]]
        numbers = document_numbers(tokens)
        assert numbers is not None and numbers.tolist() == [[0, 0, 0, 1, *[2] * 8][i] for i in index]


def test_rows_without_documents_are_alike() -> None:
    assert document_numbers(Tokens(4, 2)) is None
    tokens = Tokens(4, 3, SequencePart(1, 2))
    assert position_ids(tokens).tolist() == [[2, 3, 4, 5]] and row_lengths(tokens).tolist() == [[8]]


def test_decoding_goes_on_behind_the_cache() -> None:
    tokens = Tokens(2, 3, first_position=5)
    assert position_ids(tokens).tolist() == [[5, 6]] and row_lengths(tokens).tolist() == [[7]]


def test_given_positions_win() -> None:
    given = torch.tensor([[7, 7, 1]])
    assert position_ids(Tokens(3, 1, positions=given, cu_seqlens=CU_SEQLENS)) is given
