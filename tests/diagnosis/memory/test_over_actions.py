"""The largest number of micro-batches that a rank keeps, in bytes."""

import pytest

from megatron.core.pipeline_parallel.action_lists import rank_actions
from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.stages import Pipeline
from megatron.diagnosis.memory.chunk_bytes import ChunkBytes
from megatron.diagnosis.memory.over_actions import peak_of_actions

CHUNK = ChunkBytes(
    forward_peak=12, kept=10, backward_peak=15, deferred=4, deferred_peak=5, message_in=0, message_out=0, head=0
)


def peak(schedule: str, rank: int, chunk: ChunkBytes = CHUNK) -> int:
    found = Schedule(schedule, Pipeline(4), 8)
    return peak_of_actions(rank_actions(found, rank), [chunk]).total


@pytest.mark.parametrize("rank", range(4))
def test_1f1b_keeps_fewer_micro_batches_on_later_ranks(rank: int) -> None:
    assert peak("1f1b", rank) == 10 * (4 - rank) + 5  # in the first backward


def test_deferred_products_keep_their_factors() -> None:
    first, last = peak("zb-h1", 0), peak("zb-h1", 3)
    assert first == peak("1f1b", 0)
    assert 10 + 5 + 4 <= last <= 10 + 5 + 3 * 4  # one micro-batch, and factors of up to three


def test_messages_live_until_their_backward() -> None:
    chunk = ChunkBytes(12, 10, 15, 4, 5, message_in=100, message_out=100, head=0)
    found = peak_of_actions(rank_actions(Schedule("1f1b", Pipeline(4), 8), 1), [chunk])
    assert (found.messages, found.total) == (400, 430)  # three in flight, and one that was received ahead
