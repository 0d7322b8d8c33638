"""Rows that each rank copies for itself: the memory of other GPUs is played by files, and streams by slow threads."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.file_memory import FileMemory
from support.pool import Pool
from torch import Tensor

from megatron.core.communication import collectives
from megatron.core.communication.peer_rows import PeerRows, place_rows
from megatron.core.communication.traffic import recorded

RANKS, UNITS, ROWS = 3, 4, 6


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(RANKS, seconds=60.0) as pool:
        yield pool


def values(version: int, unit: int, rank: int) -> Tensor:
    """The rows of a rank. No two are alike."""
    return torch.arange(ROWS, dtype=torch.float32) + 1000 * (100 * version + 10 * unit + rank)


def gather_often(folder: Path, waits: bool) -> list[tuple[int, int]]:
    """Updates and gathers in turns; the next gather begins before the last one has ended. Returns the (version, unit)
    of wrong ones."""
    rank, late = dist.get_rank(), random.Random(dist.get_rank())
    memory = FileMemory(folder, RANKS, rank, UNITS * 4 * ROWS, 2 * RANKS, 0.004)
    collectives.barrier(dist.group.WORLD)
    peers, wrong = PeerRows(memory, tuple(range(RANKS)), rank), []
    for version in range(8):
        if waits:
            peers.wait_for_readers()
        for unit in range(UNITS):
            memory.view(rank, 4 * ROWS * unit, (ROWS,), torch.float32).copy_(values(version, unit, rank))
        time.sleep(late.random() * 0.01)
        outs = [torch.empty(RANKS * ROWS) for _ in range(UNITS)]
        pending = [peers.start_gather(0, outs[0])]
        for unit in range(UNITS):
            if unit + 1 < UNITS:
                pending.append(peers.start_gather(4 * ROWS * (unit + 1), outs[unit + 1]))
            got = pending[unit].wait()
            if not torch.equal(got, torch.cat([values(version, unit, each) for each in range(RANKS)])):
                wrong.append((version, unit))
    memory.close()
    collectives.barrier(dist.group.WORLD)
    return wrong


def test_every_gather_has_the_newest_rows_of_all_ranks(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(gather_often, RANKS, tmp_path, True) == [[]] * RANKS


def test_without_waiting_for_readers_rows_are_overwritten(pool: Pool, tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    assert any(pool.run(gather_often, RANKS, tmp_path, False))


def test_a_gather_is_recorded_as_one(tmp_path: Path) -> None:
    memory = FileMemory(tmp_path, 1, 0, 4 * ROWS, 2, 0.0)
    with recorded() as calls:
        PeerRows(memory, (7,), 0).start_gather(0, torch.empty(ROWS)).wait()
    memory.close()
    assert [(call.operation, call.ranks) for call in calls] == [("all_gather", (7,))]


def test_ranks_without_gpus_share_nothing(pool: Pool) -> None:
    assert pool.run(places_nothing, 2) == [True, True]


def places_nothing() -> bool:
    return place_rows(dist.group.WORLD, [torch.ones(3)]) is None
