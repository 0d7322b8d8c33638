"""Sharded weights that ranks copy from each other's memory: no bit differs from collectives, checkpoints agree."""

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from core.distributed.test_weight_file import built, trained
from core.optimizer.test_host_state import BF16, F32, assert_equal
from support.file_memory import FileMemory
from support.pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.communication import collectives
from megatron.core.communication.peer_rows import PeerRows
from megatron.core.distributed import distributed_data_parallel


class Places:
    """Plays `place_rows` with files, whose copies come late."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.memories: list[FileMemory] = []

    def __call__(self, group: ProcessGroup, rows: Sequence[Tensor]) -> tuple[PeerRows, list[tuple[int, Tensor]]]:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        starts = [256 * place for place in range(0, 64 * len(rows), 64)]
        memory = FileMemory(self.folder, ranks, rank, starts[-1] + 64 * 256, 2 * ranks, 0.002)
        self.memories.append(memory)
        collectives.barrier(group)
        placed = [memory.view(rank, at, tuple(t.shape), t.dtype) for at, t in zip(starts, rows, strict=True)]
        for target, source in zip(placed, rows, strict=True):
            target.copy_(source)
        return PeerRows(memory, tuple(range(ranks)), rank), list(zip(starts, placed, strict=True))


def no_bit_differs(folder: str, dtype: torch.dtype) -> bool:
    plain = trained(*built(None, dtype))
    places = Places(folder)
    with mock.patch.object(distributed_data_parallel, "place_rows", places):
        ddp, optimizer = built(None, dtype)
    assert len(places.memories) == 1
    assert_equal(trained(ddp, optimizer), plain)
    with ddp.whole_weights():
        whole = torch.cat([unit.param_buffer.clone() for unit in ddp.units])
    state = ddp.state_dict()
    ddp.load_state_dict({key: torch.zeros_like(value) for key, value in state.items()})
    assert not any(chunk.values().any() for chunk in ddp.weight_chunks())
    ddp.load_state_dict(state)
    with ddp.whole_weights():
        assert torch.equal(whole, torch.cat([unit.param_buffer for unit in ddp.units]))
    (peers,) = {id(unit._peers[0]): unit._peers[0] for unit in ddp.units if unit._peers}.values()
    with ddp.whole_weights():
        assert peers._awaited == peers.number > 0  # what follows may write the weights
    places.memories[0].close()
    return True


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_no_bit_differs(pool: Pool, tmp_path: Path, dtype: torch.dtype) -> None:
    assert pool.run(no_bit_differs, 2, str(tmp_path), dtype) == [True, True]
