"""The tokens that a rank routes, among those of the micro-batch."""

import pytest
import torch

from megatron.core.communication.collectives import PlannedGroup
from megatron.core.tokens import RngPosition, SequencePart, Tokens
from megatron.core.transformer.moe.micro_batch_share import MicroBatchShare

CPU = torch.device("cpu")


def shares(context: int, tensor: int, **fields: int) -> list[MicroBatchShare]:
    """Returns the shares of two rows of 8 tokens, by context and then by sequence parallel rank."""
    found, ranks = [], tuple(range(context * tensor))
    for rank in ranks:
        part = SequencePart(rank // tensor, context) if context > 1 else None
        tokens = Tokens(8 // context, 2, part, random=RngPosition(1, 2, 3), **fields)
        sequence = PlannedGroup(tuple(range(tensor)), rank % tensor) if tensor > 1 else None
        group = PlannedGroup(ranks, rank) if len(ranks) > 1 else None
        found.append(MicroBatchShare(tokens, 16 // len(ranks), group, sequence))
    return found


@pytest.mark.parametrize(("context", "tensor"), [(1, 2), (2, 1), (2, 2)])
def test_shares_cover_the_micro_batch(context: int, tensor: int) -> None:
    of_ranks = shares(context, tensor)
    assert all((share.total, share.samples, share.sample_length) == (16, 2, 8) for share in of_ranks)
    orders = [share.order(CPU) for share in of_ranks]
    assert sorted(torch.cat([order for order in orders if order is not None]).tolist()) == list(range(16))
    # Sequence-major: token (i, j) is number 2 i + j, and belongs to sample j.
    for share, order in zip(of_ranks, orders, strict=True):
        assert order is not None and torch.equal(share.sample_numbers(CPU), order % 2)


def test_noise_does_not_depend_on_how_tokens_are_shared() -> None:
    (whole,) = shares(1, 1)
    assert whole.order(CPU) is None
    numbers = whole.noise_position(7, 2, "jitter", CPU).tokens.index
    for share in shares(2, 2):
        order, mine = share.order(CPU), share.noise_position(7, 2, "jitter", CPU)
        assert order is not None and torch.equal(mine.tokens.index, numbers[order]) and mine.layer == 2


def test_a_rank_finds_its_own_among_gathered_rows() -> None:
    rows = torch.arange(16)
    assert torch.equal(torch.cat([share.own(rows) for share in shares(2, 2)]), rows)


def test_samples_of_a_packed_row() -> None:
    packed = MicroBatchShare(Tokens(16, 1, sample_length=4), 16, None, None)
    assert packed.samples == 4 and packed.sample_numbers(CPU).tolist() == [i // 4 for i in range(16)]
