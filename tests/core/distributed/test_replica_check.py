"""Replicas whose weights differ by a bit are found and named."""

from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.small_models import SmallModel

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.replica_check import ReplicaDifference, checksum, differing_units
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid

STRATEGIES: dict[str, dict[str, Any]] = {
    "replicated": {},
    "zero 1": {"use_distributed_optimizer": True, "overlap_param_gather": True},
    "zero 3": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
}


def found_on_rank() -> dict[str, tuple[list[ReplicaDifference], list[ReplicaDifference]]]:
    """The differences of equal replicas, and those after the lowest bit of one weight was flipped on rank 1."""
    rank, found = torch.distributed.get_rank(), {}
    groups = ProcessGroupCollection.from_grid(RankGrid(3), rank)
    for name, settings in STRATEGIES.items():
        model = SmallModel()
        config = DistributedDataParallelConfig(**settings)
        ddp = DistributedDataParallel(model.config, config, model, pg_collection=groups)
        before = differing_units([ddp])
        if rank == 1 and name != "zero 3":
            weights = ddp.units[1].param_buffer
            weights.view({4: torch.int32, 8: torch.int64}[weights.element_size()])[3] ^= 1
        found[name] = before, differing_units([ddp])
    return found


def test_one_bit_of_one_replica() -> None:
    results = run_on_ranks(found_on_rank, 3)
    assert results[0] == results[1] == results[2]
    for name in ("replicated", "zero 1"):
        assert results[0][name] == ([], [ReplicaDifference("layers.0", (1,))])
    assert results[0]["zero 3"] == ([], []), "sharded weights have no copies"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
def test_a_checksum_depends_on_values_and_their_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.distributed.replica_check._PIECE", 4)
    values = torch.arange(11).to(dtype)
    changed, swapped = values.clone(), values[[0, 1, 2, 9, 4, 5, 6, 7, 8, 3, 10]]
    changed[10] += 1
    sums = [int(checksum(each)) for each in (values, values.clone(), changed, swapped, values[:0])]
    assert sums[0] == sums[1] and len(set(sums)) == 4 and sums[-1] == 0
