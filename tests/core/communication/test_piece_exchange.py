"""Exchanges of pieces: what arrives, over both transports, with lanes that run late and memory that is used again.

The memory of other GPUs is played by shared files, and streams by threads with random delays.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.file_memory import FileMemory
from support.pool import Pool
from torch import Tensor

from megatron.core.communication import collectives, piece_exchange
from megatron.core.communication.piece_exchange import (
    GroupExchange,
    PieceExchange,
    SlotRing,
    open_exchange,
    refuse_transport,
)
from megatron.core.communication.traffic import recorded
from megatron.core.exceptions import UserError

ROWS, RANKS = 5, 3
LATE = 0.05
"""Seconds that a rank sometimes waits before it reads: time for the others to run ahead."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(RANKS, seconds=30.0) as pool:
        yield pool


def piece(source: int, to: int, number: int, width: int) -> Tensor:
    """What `source` sends to `to` in an exchange. No two are alike."""
    return torch.arange(ROWS * width, dtype=torch.float64).view(ROWS, width) + 1e4 * (100 * number + 10 * source + to)


def send_all(exchange: PieceExchange, number: int, width: int) -> None:
    for distance in range(1, exchange.ranks):
        exchange.send(piece(exchange.rank, (exchange.rank + distance) % exchange.ranks, number, width), distance)
    exchange.keep(piece(exchange.rank, exchange.rank, number, width))


def wrong_slots(exchange: PieceExchange, number: int, width: int) -> list[tuple[int, int]]:
    """Reads all slots, and closes the exchange. Returns (exchange, slot) of those with another rank's or an older
    exchange's piece."""
    first = exchange.receive(1)
    slots = exchange.receive_all()
    assert first.data_ptr() == slots[(exchange.rank - 1) % exchange.ranks].data_ptr()
    wrong = [
        (number, source)
        for source in range(exchange.ranks)
        if not torch.equal(slots[source], piece(source, exchange.rank, number, width))
    ]
    exchange.close()
    return wrong


def exchange_often(transport: str, count: int, delay: float, folder: Path) -> list[tuple[int, int]]:
    """Two exchanges are open at once, as in the backward of a layer, and each rank is late at random."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    late, widths = random.Random(rank), random.Random(0)
    like, memory, ring = torch.empty(0, dtype=torch.float64), None, None
    if transport == "symmetric-memory":
        largest = ROWS * 8 * 8
        memory = FileMemory(folder, ranks, rank, *SlotRing.sizes(ranks, largest), delay)
        ring = SlotRing(memory, tuple(range(ranks)), rank, largest)
        collectives.barrier(group)

    def opened(width: int) -> PieceExchange:
        return GroupExchange(group, (ROWS, width), like) if ring is None else ring.open((ROWS, width), like.dtype)

    wrong = []
    for number in range(0, 2 * count, 2):
        pair = [(opened(width), number + each, width) for each, width in enumerate(widths.choices(range(1, 9), k=2))]
        for each in pair:
            send_all(*each)
        for each in pair:
            time.sleep(LATE if late.random() < 0.15 else 0.0)
            wrong += wrong_slots(*each)
    if memory is not None:
        memory.close()
    collectives.barrier(group)
    return wrong


@pytest.mark.parametrize("transport", ["symmetric-memory", "process-group"])
def test_every_slot_has_its_piece_however_late_ranks_and_lanes_are(transport: str, pool: Pool, tmp_path: Path) -> None:
    assert pool.run(exchange_often, RANKS, transport, 16, 0.001, tmp_path) == [[]] * RANKS


def open_too_many(folder: Path) -> str:
    memory = FileMemory(folder, RANKS, dist.get_rank(), *SlotRing.sizes(RANKS, 8), 0.0)
    ring = SlotRing(memory, tuple(range(RANKS)), dist.get_rank(), 8)
    try:
        for _ in range(SlotRing.DEPTH + 1):
            ring.open((1,), torch.float64)
    except AssertionError as error:
        return str(error)
    finally:
        memory.close()
    return "nothing was refused"


def test_memory_in_use_is_not_given_to_another_exchange(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(open_too_many, RANKS, tmp_path) == ["more than 2 exchanges are open"] * RANKS


def unread() -> str:
    exchange = open_exchange(dist.group.WORLD, (1,), torch.zeros(1), None)
    for distance in (1, 2):
        exchange.send(torch.ones(1), distance)
    exchange.receive(1)
    try:
        exchange.close()
    except AssertionError as error:
        exchange.receive_all()
        return str(error)
    return "nothing was refused"


def test_a_piece_that_nobody_receives_is_a_bug(pool: Pool) -> None:
    assert pool.run(unread, RANKS) == ["distances [2] were not received"] * RANKS


def traffic() -> list[Any]:
    with recorded() as log:
        exchange = open_exchange(dist.group.WORLD, (3,), torch.zeros(1, dtype=torch.float64), None)
        for distance in (1, 2):
            exchange.send(torch.ones(3, dtype=torch.float64), distance)
        exchange.receive_all()
        exchange.close()
    return [(entry.operation, entry.nbytes, entry.ranks) for entry in log]


def test_traffic_is_recorded(pool: Pool) -> None:
    first, *_ = pool.run(traffic, RANKS)
    assert first == [("send", 24, (0, 1)), ("receive", 24, (2, 0)), ("send", 24, (0, 2)), ("receive", 24, (1, 0))]


def without_shared_memory(answer: str) -> list[Any]:
    """Opens two exchanges as on GPUs of which one does not share its memory."""
    asked = []

    def refuse(*arguments: Any) -> Any:
        asked.append("memory")
        raise UserError(answer)

    class OnGpu(torch.Tensor):
        is_cuda = True

    like = torch.zeros(1).as_subclass(OnGpu)
    with mock.patch.object(piece_exchange, "SymmetricMemory", refuse):
        group = dist.new_group()
        for _ in range(2):
            exchange = open_exchange(group, (1,), like, None)
            for distance in (1, 2):
                exchange.send(torch.full((1,), float(dist.get_rank())), distance)
            slots = exchange.receive_all().flatten().tolist()
            asked.append([slots[rank] for rank in range(RANKS) if rank != dist.get_rank()])
            exchange.close()
        try:
            open_exchange(group, (1,), like, "symmetric-memory")
        except UserError as error:
            asked.append(str(error))
    return asked


def test_collectives_send_pieces_where_gpus_share_no_memory(pool: Pool) -> None:
    found = pool.run(without_shared_memory, RANKS, "no peer access")
    others = ([1.0, 2.0], [0.0, 2.0], [0.0, 1.0])
    assert found == [["memory", slots, slots, "memory", "no peer access"] for slots in others]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without GPUs")
def test_symmetric_memory_without_a_gpu_is_refused() -> None:
    refuse_transport("process-group")
    with pytest.raises(UserError, match="--tp-comm-overlap-transport symmetric-memory needs GPUs"):
        refuse_transport("symmetric-memory")
