"""All-to-alls by copies into the memory of other ranks: what arrives, with lanes that run late and memory that is used
again; gradients of a layer of experts. The memory of other GPUs is played by shared files, streams by threads."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.file_memory import FileMemory
from support.pool import Pool

from megatron.core.communication.collectives import barrier
from megatron.core.communication.traffic import recorded
from megatron.core.transformer.moe.async_collective import AsyncCollective, Route
from megatron.core.transformer.moe.peer_all_to_all import PendingRows, RowRing

MOST, SHAPE = 5, (3,)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(3) as pool:
        yield pool


def rows_of(number: int, source: int, to: int, count: int) -> torch.Tensor:
    """What `source` sends to `to`. No two are alike."""
    return torch.arange(count * 3, dtype=torch.float64).view(count, *SHAPE) + 1e4 * (100 * number + 10 * source + to)


def exchange_often(count: int, delay: float, folder: Path) -> list[int]:
    """Returns the numbers of wrong all-to-alls. Up to two are under way, and each rank is late at random."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    late, sizes = random.Random(rank), random.Random(0)
    memory = FileMemory(folder, ranks, rank, *RowRing.sizes(ranks, MOST, 24), delay)
    ring = RowRing(memory, tuple(range(ranks)), rank, MOST, SHAPE)
    barrier(dist.group.WORLD)
    wrong: list[int] = []
    open_ones: list[tuple[int, PendingRows, torch.Tensor]] = []

    def finish() -> None:
        number, pending, expected = open_ones.pop(0)
        time.sleep(late.random() * delay)
        if not torch.equal(pending.wait(), expected):
            wrong.append(number)

    for number in range(count):
        sent = [[sizes.randint(0, MOST) for _ in range(ranks)] for _ in range(ranks)]  # [from][to]
        received = [row[rank] for row in sent]
        rows = torch.cat([rows_of(number, rank, to, sent[rank][to]) for to in range(ranks)])
        expected = torch.cat([rows_of(number, source, rank, received[source]) for source in range(ranks)])
        open_ones.append((number, ring.start(rows, received, sent[rank]), expected))
        del rows
        if len(open_ones) > number % 3:
            finish()
    while open_ones:
        finish()
    memory.close()
    barrier(dist.group.WORLD)
    return wrong


def test_rows_arrive_however_late_ranks_and_lanes_are(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(exchange_often, 3, 20, 0.001, tmp_path) == [[]] * 3


def there_and_back(folder: Path) -> bool:
    """Sends rows and their gradients; returns whether the gradients are right."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    memory = FileMemory(folder, ranks, rank, *RowRing.sizes(ranks, MOST, 24), 0.0)
    ring = RowRing(memory, tuple(range(ranks)), rank, MOST, SHAPE)
    sent, received = [0 if to == rank else 1 + rank for to in range(ranks)], [1 + source for source in range(ranks)]
    received[rank] = 0
    rows = torch.randn(sum(sent), *SHAPE, dtype=torch.float64, requires_grad=True)
    route = Route(lambda rows: ring.start(rows, received, sent), lambda rows: ring.start(rows, sent, received))
    (found,) = AsyncCollective(route, None, 2.0 * rows).finish()
    (found**2).sum().backward()
    memory.close()
    assert rows.grad is not None
    return torch.equal(rows.grad, 8.0 * rows)


def test_gradients_travel_back(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(there_and_back, 3, tmp_path) == [True] * 3


def open_too_many(folder: Path) -> str:
    memory = FileMemory(folder, 2, dist.get_rank(), *RowRing.sizes(2, 1, 8), 0.0)
    ring = RowRing(memory, (0, 1), dist.get_rank(), 1, ())
    try:
        with recorded() as log:
            for _ in range(RowRing.DEPTH + 1):
                ring.start(torch.zeros(1), [0, 0], [0, 1])
    except AssertionError as error:
        assert [(entry.operation, entry.nbytes, entry.ranks) for entry in log] == [("all_to_all", 4, (0, 1))] * 3
        return str(error)
    finally:
        memory.close()
    return "nothing was refused"


def test_memory_in_use_is_not_given_to_another_exchange(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(open_too_many, 2, tmp_path) == ["more than 3 exchanges are under way"] * 2
