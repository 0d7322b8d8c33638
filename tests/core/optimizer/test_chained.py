"""ChainedOptimizer: two halves of a model step as one optimizer of the whole model does."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

CONFIG = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
SETTINGS = OptimizerConfig(lr=0.1, clip_grad=0.5)


def chunk(seed: int) -> DistributedDataParallel:
    torch.manual_seed(seed)
    return DistributedDataParallel(CONFIG, DistributedDataParallelConfig(), nn.Linear(3, 3))


def fill(chunks: list[DistributedDataParallel], scale: float = 1.0) -> None:
    for number, one in enumerate(chunks, 1):
        one.zero_grad_buffer()
        (one(torch.ones(2, 3)).sum() * number * scale).backward()
        one.finish_grad_sync()


def weights(chunks: list[DistributedDataParallel]) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for one in chunks for parameter in one.parameters()])


def test_it_clips_and_steps_as_one_optimizer() -> None:
    together, apart = [chunk(1), chunk(2)], [chunk(1), chunk(2)]
    one = get_megatron_optimizer(SETTINGS, together)
    chained = ChainedOptimizer([get_megatron_optimizer(SETTINGS, [part]) for part in apart])
    assert len(chained.param_groups) == 2 * len(one.param_groups)
    for scale in (1.0, 0.1):
        fill(together, scale)
        fill(apart, scale)
        assert chained.step()[1] == pytest.approx(one.step()[1])
        assert torch.allclose(weights(apart), weights(together), atol=0, rtol=1e-6)
    copy = ChainedOptimizer([get_megatron_optimizer(SETTINGS, [chunk(seed)]) for seed in (1, 2)])
    copy.load_state_dict(chained.state_dict())
    assert copy.common_state() == chained.common_state()


def test_one_part_that_is_not_finite_stops_all() -> None:
    chunks = [chunk(1), chunk(2)]
    chained = ChainedOptimizer([get_megatron_optimizer(SETTINGS, [part]) for part in chunks])
    before = weights(chunks)
    fill(chunks)
    next(chunks[1].parameters()).main_grad.fill_(float("nan"))
    assert chained.step() == (False, None, None) and torch.equal(weights(chunks), before)


def test_other_optimizers_are_refused() -> None:
    with pytest.raises(UserError, match="it was given none"):
        ChainedOptimizer([])
    part = chunk(1)
    others: list[Any] = [get_megatron_optimizer(SETTINGS, [part]), torch.optim.SGD(part.parameters())]
    with pytest.raises(UserError, match="it was given FlatOptimizer, SGD"):
        ChainedOptimizer(others)
