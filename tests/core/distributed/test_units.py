"""Plans of units: names, order, alignment, and how ranks' shards divide parameters."""

import pytest
import torch
from support.small_models import SmallModel
from torch import nn

from megatron.core.distributed.units import ALIGNMENT, UnitPlan, named_infos, plan_frozen_units, plan_units, unit_name
from megatron.core.initializers import Constant
from megatron.core.parameters import declare, info_of, name_parameters


def names(plan: UnitPlan) -> list[str]:
    return [slot.info.name for slot in plan.slots]


def test_a_layer_is_a_unit_and_its_decayed_parameters_come_first() -> None:
    plans = plan_units(SmallModel(layers=2, tied=False))
    assert [plan.name for plan in plans] == ["embedding", "layers.0", "layers.1", "output_layer"]
    assert names(plans[1]) == ["layers.0.weight", "layers.0.norm", "layers.0.bias"]
    assert [(slot.start, slot.stop) for slot in plans[1].slots] == [(0, 36), (64, 70), (128, 134)]
    assert plans[1].numel == 192


def test_types_of_main_gradients() -> None:
    """--main-grads-dtype: parameters of that type alone accumulate in it."""
    model = SmallModel(dtype=torch.bfloat16)
    model.layers[1].float()
    assert {plan.grad_dtype for plan in plan_units(model)} == {torch.float32}
    plans = plan_units(model, main_grads_dtype=torch.bfloat16)
    assert {plan.name: plan.grad_dtype for plan in plans if "layers" in plan.name} == {
        "layers.0": torch.bfloat16,
        "layers.1": torch.float32,
        "layers.2": torch.bfloat16,
    }
    assert {plan.main_dtype for plan in plans} == {torch.float32}


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_parameters_are_aligned_and_shards_are_equal(shards: int) -> None:
    for plan in plan_units(SmallModel(padded=3), {"dense": shards}):
        assert plan.numel % (ALIGNMENT * shards) == 0
        assert all(slot.start % ALIGNMENT == 0 for slot in plan.slots)
        ends = [slot.stop for slot in plan.slots]
        assert all(end <= slot.start for end, slot in zip(ends, plan.slots[1:], strict=False))
        assert 0 <= plan.numel - ends[-1] < ALIGNMENT * (shards + 1)


def test_slices_of_all_shards_cover_every_box_once() -> None:
    (plan, *_) = plan_units(SmallModel(width=50, padded=3), {"dense": 3})
    (slot,) = plan.slots
    assert (slot.stop, slot.box_stop) == (16 * 50, 13 * 50)
    size = plan.numel // 3
    flat, seen = torch.arange(plan.numel), []
    for number in range(3):
        shard = flat[number * size : (number + 1) * size]
        for part in plan.parameter_slices((number * size, (number + 1) * size)):
            assert part.flat_range is not None and part.info is slot.info
            assert part.view_in(shard).tolist() == list(range(*part.flat_range))
            seen += part.view_in(shard).tolist()
    assert seen == list(range(13 * 50)) == slot.box_view_in(flat).tolist()
    (whole,) = plan.parameter_slices((0, plan.numel))
    assert whole.flat_range is None


def test_types_grids_and_tied_weights_have_units_of_their_own() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    facts = {"plain": {}, "expert": {"grid": "expert"}, "tied": {"tied": True}, "narrow": {}, "frozen": {}}
    for name, fact in facts.items():
        parameter = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16 if name == "narrow" else torch.float64))
        declare(parameter, Constant(1.0), **fact)
        setattr(model.layers[0], name, parameter.requires_grad_(name != "frozen"))
    name_parameters(model)
    plans = plan_units(model)
    assert [(plan.name, plan.grid, names(plan)) for plan in plans] == [
        ("layers.0", "dense", ["layers.0.plain"]),
        ("layers.0", "expert", ["layers.0.expert"]),
        ("layers.0.tied", "dense", ["layers.0.tied"]),
        ("layers.0", "dense", ["layers.0.narrow"]),
    ]
    assert [plan.main_dtype for plan in plans] == [torch.float64] * 3 + [torch.float32]
    assert [plan.needs_main_weights for plan in plans] == [False] * 3 + [True]


def test_frozen_weights_that_ranks_shard() -> None:
    """Not those of a grid that is not sharded, nor what code writes: state, and parameters of unknown purpose."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    facts = {"plain": {}, "expert": {"grid": "expert"}, "coded": {"in_nf4": True}, "state": {"is_state": True}}
    for name, fact in facts.items():
        parameter = declare(nn.Parameter(torch.ones(8, 8), requires_grad=False), Constant(1.0), **fact)
        setattr(model.layers[0], name, parameter)
    model.layers[0].unknown = nn.Parameter(torch.ones(8, 8), requires_grad=False)
    model.layers[0].trained = declare(nn.Parameter(torch.ones(8, 8)), Constant(1.0))
    name_parameters(model)
    assert not plan_frozen_units(model, {})
    plans = plan_frozen_units(model, {"dense": 4})
    assert [(plan.name, names(plan), plan.in_nf4) for plan in plans] == [
        ("layers.0", ["layers.0.plain"], False),
        ("layers.0", ["layers.0.coded"], True),
    ]
    assert {plan.numel for plan in plans} == {4 * ALIGNMENT}
    assert [names(plan) for plan in plan_units(model)] == [["layers.0.trained"]]


def test_names_of_units() -> None:
    model = SmallModel()
    assert unit_name(info_of(model.layers[1].bias)) == "layers.1"
    assert unit_name(info_of(model.embedding.table)) == "embedding"


def test_undeclared_parameters_get_their_path_as_name() -> None:
    wrapped = nn.Sequential()
    wrapped.module = nn.Linear(2, 2)
    assert [info.name for _, info in named_infos(wrapped)] == ["weight", "bias"]
    assert info_of(wrapped.module.weight).name == "weight"
