"""Norms over the whole model against a plain sum over its parameters."""

import pytest
import torch
from support.processes import run_on_ranks
from support.small_models import SmallModel

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.optimizer.clip_grads import weight_norm


def norms(dtype: torch.dtype = torch.float64) -> tuple[float, float]:
    dist = torch.distributed
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    groups = ProcessGroupCollection.from_grid(RankGrid(world), rank)
    model = SmallModel(dtype=dtype, padded=2)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model, pg_collection=groups)
    plain = sum(float(parameter.detach().double().square().sum()) for parameter in set(model.parameters())) ** 0.5
    return float(weight_norm(wrapped.units, groups)), plain


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 1e-6)])
def test_the_norm_of_all_weights(dtype: torch.dtype, tolerance: float) -> None:
    ours, plain = norms(dtype)
    assert plain > 1.0 and ours == pytest.approx(plain, rel=tolerance)


def test_replicas_are_counted_once() -> None:
    for ours, plain in run_on_ranks(norms, 2):
        assert ours == pytest.approx(plain, rel=1e-13)
