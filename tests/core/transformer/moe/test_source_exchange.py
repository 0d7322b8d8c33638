"""Tokens that are exchanged rank by rank: values and gradients, with too little room for rows, lanes that run late and
memory that is used again. The memory of other GPUs is played by shared files, streams by threads."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.file_memory import FileMemory
from support.pool import Pool
from torch import Tensor

from megatron.core.backends import LOCAL
from megatron.core.communication.collectives import barrier, gather_rows
from megatron.core.communication.peer_memory import WITHOUT_SHARED_MEMORY
from megatron.core.communication.traffic import recorded
from megatron.core.distributed.expert_placement import AT_HOME
from megatron.core.exceptions import UserError
from megatron.core.ops.moe.grouped_linear import RowGroups, grouped_linear
from megatron.core.transformer.moe.peer_all_to_all import RowRing
from megatron.core.transformer.moe.source_exchange import FittingLink, GroupLink, PeerLink, SourceExchange

TOKENS, WIDTH, STEPS, RANKS = 5, 3, 7, 3


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(RANKS) as pool:
        yield pool


class FileLink(PeerLink):
    """A peer link over shared files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(dist.group.WORLD)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.memory = FileMemory(folder, ranks, rank, *RowRing.sizes(ranks, TOKENS, 8 * WIDTH), 0.001)
        self._ring = RowRing(self.memory, tuple(range(ranks)), rank, TOKENS, (WIDTH,))

    def ring(self, rows: Tensor) -> RowRing:
        assert (rows.shape, rows.dtype) == ((TOKENS, WIDTH), torch.float64)
        return self._ring


def drawn(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens of a rank, and the two ranks (of one more than there are) that each goes to."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    return tokens, torch.rand(TOKENS, RANKS + 1, generator=generator).argsort(1)[:, :2]


def largest_errors(
    by_files: bool, in_steps: bool, room: int, folder: Path
) -> tuple[float, float, list[tuple[str, float]]]:
    """Rank r multiplies its rows by r + 2. Returns the largest errors of outputs and gradients, and the traffic of the
    last step."""
    rank = dist.get_rank()
    link = FileLink(folder) if by_files else GroupLink(dist.group.WORLD)
    weight = torch.eye(WIDTH, dtype=torch.float64)[None]
    barrier(dist.group.WORLD)
    errors = [0.0, 0.0]
    for step in range(STEPS):
        tokens, to = drawn(step, rank)
        tokens.requires_grad_()
        here = gather_rows(to, dist.group.WORLD) == rank  # [all tokens, 2]
        places = torch.where(here, here.flatten().cumsum(0).view(here.shape) - 1, -1)
        by_source = here.view(RANKS, -1).sum(1)[None]  # [1 group, sources]
        groups, count = RowGroups(by_source.sum(1), by_source=by_source), int(here.sum())
        exchange = SourceExchange(link, RANKS, rank, LOCAL, None)
        with recorded() as log:
            exchange.start_dispatch(tokens)
            exchange.start_rows(places, room)
            bounds = groups.bounds_by_source
            if in_steps:
                rows, arriving = exchange.arriving(bounds, lambda count=count: count, AT_HOME, lambda: False)
                product = grouped_linear(rows, weight * (rank + 2), groups, steps=arriving)
                results = grouped_linear(product, weight, groups, steps=exchange.leaving(bounds))
            else:
                results = exchange.rows(count) * (rank + 2)
            exchange.start_combine(results, in_steps)
            output = exchange.finish_combine()
            output.backward(torch.ones_like(output) * (rank + 1))
        factor = torch.where(to < RANKS, to + 2, 0).sum(1, dtype=torch.float64)[:, None]
        assert tokens.grad is not None
        errors[0] = max(errors[0], float((output - factor * tokens).abs().max()))
        errors[1] = max(errors[1], float((tokens.grad - factor * (rank + 1)).abs().max()))
    if isinstance(link, FileLink):
        link.memory.close()
    barrier(dist.group.WORLD)
    return errors[0], errors[1], [(entry.operation, entry.sent_bytes) for entry in log]


@pytest.mark.parametrize("in_steps", [True, False], ids=["part after part", "at once"])
@pytest.mark.parametrize("by_files", [True, False], ids=["peers", "group"])
def test_outputs_and_gradients(by_files: bool, in_steps: bool, pool: Pool, tmp_path: Path) -> None:
    for room in (0, 4, 40):
        folder = tmp_path / f"{room}"
        folder.mkdir()
        for outputs, gradients, traffic in pool.run(largest_errors, RANKS, by_files, in_steps, room, folder):
            assert outputs < 1e-12 and gradients < 1e-12
            # Tokens to two ranks and sums to two ranks, in forward and in backward.
            assert sum(sent for _, sent in traffic) == 4 * 2 * 8 * TOKENS * WIDTH
            assert {kind for kind, _ in traffic} <= ({"all_to_all"} if by_files else {"all_gather", "all_to_all"})


def fitting_links() -> tuple[list[type], int]:
    """Returns the links for rows on a CPU, on GPUs that share no memory, there once more, and on GPUs that share it.
    Also returns how often the second and third asked for memory."""
    asked: list[object] = []

    def refuse(self: PeerLink, rows: Tensor) -> RowRing:
        asked.append(rows)
        raise UserError("GPUs of a group cannot share memory")

    group, on_gpu = dist.group.WORLD, SimpleNamespace(is_cuda=True)
    with patch.object(PeerLink, "ring", refuse):
        links = [FittingLink(group).of(rows) for rows in (torch.ones(1), on_gpu, on_gpu)]  # type: ignore[arg-type]
    WITHOUT_SHARED_MEMORY.discard(group)
    with patch.object(PeerLink, "ring", lambda self, rows: None):
        links.append(FittingLink(group).of(on_gpu))  # type: ignore[arg-type]
    return [type(link) for link in links], len(asked)


def test_gpus_that_share_no_memory_use_the_process_group(pool: Pool) -> None:
    assert pool.run(fitting_links, RANKS) == [([GroupLink, GroupLink, GroupLink, PeerLink], 1)] * RANKS
