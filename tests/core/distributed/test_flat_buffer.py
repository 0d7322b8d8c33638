"""Memory of units: parameters are views of it, and sharded weights come and go. Two ranks are pretended."""

import pytest
import torch
from support.small_models import SmallModel
from torch import Tensor

from megatron.core.communication.collectives import Group, Pending, PlannedGroup
from megatron.core.distributed import flat_buffer
from megatron.core.distributed.flat_buffer import Unit
from megatron.core.distributed.freed_parameter import FreedParameter
from megatron.core.distributed.sharding_strategy import Sharding, ShardingStrategy
from megatron.core.distributed.units import plan_units


def units_of_ranks(strategy: ShardingStrategy, ranks: int = 2) -> list[Unit]:
    """The unit of one layer of the same model, as each rank has it."""
    units = []
    for rank in range(ranks):
        plan = plan_units(SmallModel(), {"dense": ranks})[1]
        group = PlannedGroup(tuple(range(ranks)), rank)
        units.append(Unit(plan, {"dense": Sharding(strategy, ranks, rank)}, group))
    return units


def pretend_gather(monkeypatch: pytest.MonkeyPatch, shards: list[Tensor]) -> None:
    def gather(tensor: Tensor, group: Group, out: Tensor) -> Pending:
        assert isinstance(group, PlannedGroup) and tensor is shards[group.rank]
        return Pending(out.copy_(torch.cat(shards)), None)

    monkeypatch.setattr(flat_buffer, "start_gather_rows", gather)


def test_parameters_keep_their_values_in_one_buffer() -> None:
    before = [parameter.detach().clone() for parameter in SmallModel().layers[0].parameters()]
    plan = plan_units(model := SmallModel())[1]
    unit = Unit(plan, {"dense": Sharding()})
    for parameter, value in zip(model.layers[0].parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.untyped_storage().data_ptr() == unit.param_buffer.untyped_storage().data_ptr()
    unit.param_buffer.fill_(2.0)
    assert all((parameter == 2.0).all() for parameter in model.layers[0].parameters())
    assert unit.weight_shard.data_ptr() == unit.param_buffer.data_ptr() and unit.shard_range == (0, plan.numel)


def test_gradients_are_bound_to_a_buffer_in_the_main_type() -> None:
    plan = plan_units(model := SmallModel(dtype=torch.bfloat16))[1]
    unit, seen = Unit(plan, {"dense": Sharding()}), []
    buffer = torch.zeros(plan.numel)
    unit.bind_gradients(buffer, buffer, seen.append, lambda: seen.append("before"))  # type: ignore[arg-type]
    model.layers[0].bias.main_grad_accumulator.add(torch.ones(6, dtype=torch.bfloat16))
    assert seen == ["before", model.layers[0].bias]
    slot = next(slot for slot in unit.slots if slot.parameter is model.layers[0].bias)
    assert buffer.sum() == 6.0 and slot.view_in(buffer).eq(1.0).all()
    with pytest.raises(AssertionError):
        unit.bind_gradients(torch.zeros(plan.numel, dtype=torch.bfloat16), buffer, seen.append)


def test_updates_of_all_shards_reach_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = units = units_of_ranks(ShardingStrategy.OPTIMIZER)
    pretend_gather(monkeypatch, [unit.weight_shard for unit in units])
    expected = torch.arange(first.plan.numel, dtype=torch.float64)
    for unit in units:
        unit.weight_shard.copy_(expected[slice(*unit.shard_range)])
    first.start_all_gather()
    first.finish_all_gather()
    assert not torch.equal(first.param_buffer, expected)  # not told of the update: nothing is gathered
    for unit in units:
        unit.mark_updated()
        unit.start_all_gather()
        unit.finish_all_gather()
        assert torch.equal(unit.param_buffer, expected)
    second.weight_shard.zero_()
    first.start_all_gather()  # up to date: gathers nothing again
    first.finish_all_gather()
    assert torch.equal(first.param_buffer, expected)


def test_sharded_weights_have_memory_only_while_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    units = units_of_ranks(ShardingStrategy.PARAMETERS)
    pretend_gather(monkeypatch, [unit.weight_shard for unit in units])
    whole = [slot.parameter.detach().clone() for slot in plan_units(SmallModel())[1].slots]
    for unit in units:
        assert not unit.has_whole_weights and unit.weight_shard.numel() == unit.plan.numel // 2
        assert all(isinstance(slot.parameter, FreedParameter) for slot in unit.slots)
        unit.start_all_gather()
        unit.finish_all_gather()
        for slot, expected in zip(unit.slots, whole, strict=True):
            assert torch.equal(slot.parameter, expected)
    for unit in units:
        unit.param_buffer.add_(1.0)
        unit.copy_to_shard()
        unit.reshard()
        assert not unit.has_whole_weights
    units[0].start_all_gather()
    units[0].finish_all_gather()
    for slot, expected in zip(units[0].slots, whole, strict=True):
        assert torch.equal(slot.parameter, expected + 1.0)


def test_whole_gradients_are_gathered_from_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    units = units_of_ranks(ShardingStrategy.OPTIMIZER)
    expected = torch.arange(units[0].plan.numel, dtype=torch.float64)
    shards = []
    for unit in units:
        shards.append(expected[slice(*unit.shard_range)].clone())
        unit.bind_gradients(torch.zeros_like(expected), shards[-1], lambda parameter: None)
    pretend_gather(monkeypatch, shards)
    for unit in units:
        unit.all_gather_gradients()
        assert torch.equal(unit.grad_buffer, expected)
