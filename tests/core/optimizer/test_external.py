"""A plain torch optimizer in the loop."""

from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.small_models import SmallModel, batch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.initializers import Normal
from megatron.core.optimizer import ExternalOptimizer, OptimizerConfig
from megatron.core.parameters import declare, initialize_parameters, name_parameters
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler


def build(kind: Any = torch.optim.Adam, clip: float = 0.5, **settings: Any) -> tuple[Any, ExternalOptimizer]:
    model = SmallModel()
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    config = OptimizerConfig(lr=0.1, clip_grad=clip)
    return ddp, ExternalOptimizer(config, kind(ddp.parameters(), **{"lr": 0.1} | settings), [ddp])


def train(ddp: Any, optimizer: ExternalOptimizer, steps: range, spoil: int | None = None) -> list[bool]:
    applied = []
    for step in steps:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        ddp(*batch(step, rows=2)).backward()
        ddp.finish_grad_sync()
        if step == spoil:
            ddp.units[0].grad_buffer[0] = float("nan")
        applied.append(optimizer.step()[0])
    return applied


def weights(ddp: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in ddp.parameters()]


def test_it_does_what_the_optimizer_does_alone() -> None:
    ddp, optimizer = build()
    assert train(ddp, optimizer, range(4)) == [True] * 4
    model = SmallModel()
    alone = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(4):
        model(*batch(step, rows=2)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        alone.step()
        alone.zero_grad()
    for got, expected in zip(weights(ddp), weights(model), strict=True):
        assert torch.allclose(got, expected, rtol=1e-11, atol=0)


def test_a_gradient_that_is_not_finite_is_skipped() -> None:
    ddp, optimizer = build()
    train(ddp, optimizer, range(1))
    before = weights(ddp)
    assert train(ddp, optimizer, range(1, 2), spoil=1) == [False]
    assert all(map(torch.equal, weights(ddp), before))
    assert not optimizer.step_on_device(torch.tensor(False)).update_applied


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_state_goes_out_and_into_a_fresh_one(kind: Any) -> None:
    momentum = {} if kind is torch.optim.Adam else {"momentum": 0.9}
    ddp, optimizer = build(kind, **momentum)
    train(ddp, optimizer, range(2))
    saved = optimizer.state_dict()
    middle = weights(ddp)
    train(ddp, optimizer, range(2, 4))
    fresh, again = build(kind, **momentum)
    with torch.no_grad():
        for parameter, weight in zip(fresh.parameters(), middle, strict=True):
            parameter.copy_(weight)
    again.load_state_dict(saved)
    assert all(map(torch.equal, weights(fresh), middle))
    train(fresh, again, range(2, 4))
    assert all(map(torch.equal, weights(fresh), weights(ddp)))


def test_asking_for_state_before_the_first_step_changes_nothing() -> None:
    runs = []
    for asks in (False, True):
        ddp, optimizer = build()
        if asks:
            before = weights(ddp)
            assert optimizer.state_dict()["common"]["layers.0.norm"] == {"step": 0.0}
            assert all(map(torch.equal, weights(ddp), before))
        train(ddp, optimizer, range(2))
        runs.append(weights(ddp))
    assert all(map(torch.equal, *runs))


def test_the_schedule_drives_the_rate_and_leaves_the_scripts_decay() -> None:
    _, optimizer = build(torch.optim.AdamW, weight_decay=0.3)
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 1.0, 0.0, 10, 100, "linear", 0.01, 0.01, 1, "constant")
    scheduler.advance_on_device(torch.tensor(True), 5)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.3)


def test_what_it_cannot_do_is_refused() -> None:
    model = SmallModel()
    with pytest.raises(UserError, match=r"script's own Adam is not wrapped"):
        ExternalOptimizer(OptimizerConfig(lr=0.1), torch.optim.Adam(model.parameters()), [model])
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    with pytest.raises(UserError, match=r"--fp16 with the script's own SGD"):
        ExternalOptimizer(OptimizerConfig(lr=0.1, fp16=True), torch.optim.SGD(ddp.parameters(), 0.1), [ddp])
    with pytest.raises(UserError, match=r"SGD has 1 tensors"):
        ExternalOptimizer(OptimizerConfig(lr=0.1), torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1), [ddp])


class Stage(torch.nn.Module):
    """What one of two pipeline stages holds."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.config = None
        self.layers = torch.nn.ModuleDict({str(number): torch.nn.Linear(3, 2, bias=False)})
        declare(self.layers[str(number)].weight, Normal(1.0))
        name_parameters(self)
        initialize_parameters(self, 1)


def state_of_stage() -> tuple[dict[str, Any], float]:
    rank = torch.distributed.get_rank()
    groups = ProcessGroupCollection.from_grid(RankGrid(2, pipeline=2), rank)
    model = Stage(rank)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model, pg_collection=groups)
    optimizer = ExternalOptimizer(OptimizerConfig(lr=0.1), torch.optim.Adam(ddp.parameters(), lr=0.1), [ddp])
    for parameter in ddp.parameters():
        parameter.main_grad.fill_(1.0)
    norm = optimizer.step_on_device().grad_norm
    state = optimizer.common_state()
    optimizer.load_common_state(state)
    return state, float(norm)


def test_stages_tell_each_other_what_is_common() -> None:
    (first, norm), (second, _) = run_on_ranks(state_of_stage, 2)
    assert first == second == {f"layers.{number}.weight": {"step": 1.0} for number in (0, 1)}
    assert norm == pytest.approx(12**0.5, rel=1e-6)
