"""The optimizer's step as a graph gives the bits of the eager step."""

from typing import Any

import pytest
import torch
from support.graph_recorder import OperationRecorder
from support.processes import run_on_ranks
from support.small_models import SmallModel
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.optimizer import ChainedOptimizer, FlatOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.captured_update import CapturedUpdate


def build(**settings: Any) -> FlatOptimizer:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    rank = torch.distributed.get_rank() if world > 1 else 0
    groups = ProcessGroupCollection.from_grid(RankGrid(world), rank)
    model = SmallModel(dtype=torch.float32)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model, pg_collection=groups)
    config = OptimizerConfig(**({"lr": 0.05, "weight_decay": 0.1, "clip_grad": 1.0} | settings))
    optimizer = get_megatron_optimizer(config, [ddp], stop_on_nonfinite=True)
    assert isinstance(optimizer, FlatOptimizer)
    return optimizer


def weights_after(optimizer: FlatOptimizer, update: Any, changes: dict[int, float]) -> tuple[Tensor, list[Any]]:
    """Six steps; `changes` are weight decays by step. The loss of step 4 is not finite, which halts the optimizer."""
    updates = []
    for step in range(6):
        for number, unit in enumerate(optimizer.units):
            generator = torch.Generator().manual_seed(10 * step + number)
            unit.grad_buffer.copy_(torch.randn(unit.grad_buffer.shape, generator=generator))
        for group in optimizer.param_groups:
            group["lr"].copy_(torch.tensor(0.01 * (step + 1)))
            group["weight_decay"] = changes.get(step, group["weight_decay"])
        updates.append(update(torch.tensor(step != 4)))
    values = [(u.grad_norm.item(), u.update_applied.item(), u.num_zeros) for u in updates]
    return torch.cat([unit.param_buffer for unit in optimizer.units]).clone(), values


@pytest.mark.parametrize("settings", [{}, {"optimizer": "sgd"}, {"fp16": True, "initial_loss_scale": 4.0}])
def test_the_graph_gives_the_bits_of_the_eager_step(settings: dict[str, Any]) -> None:
    changes = {3: 0.2}
    eager, captured, recorder = build(**settings), build(**settings), OperationRecorder()
    expected = weights_after(eager, eager.step_on_device, changes)
    found = weights_after(captured, CapturedUpdate(captured, recorder, 2), changes)
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
    assert [applied for _, applied, _ in found[1]] == [True] * 4 + [False] * 2
    assert (recorder.warmed, recorder.captured, recorder.replayed) == (2, 2, 4), "weight decay is a constant of a graph"


def test_what_a_script_may_have_set_is_refused() -> None:
    optimizer = build()
    update = CapturedUpdate(optimizer, OperationRecorder(), 1)
    update(torch.tensor(True))
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(UserError, match="a learning rate that is no tensor"):
        update(torch.tensor(True))
    with pytest.raises(UserError, match="ChainedOptimizer is not the optimizer of the flags"):
        CapturedUpdate(ChainedOptimizer([optimizer]), OperationRecorder(), 1)


def refusal() -> str:
    with pytest.raises(UserError) as refused:
        CapturedUpdate(build(), OperationRecorder(), 1)
    return str(refused.value)


def test_an_update_that_communicates_is_refused() -> None:
    assert all("the update communicates between ranks" in message for message in run_on_ranks(refusal, 2))
