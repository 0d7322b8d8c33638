"""Scales of the recipes, and the history of delayed scaling."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.ops.fp8 import recipes
from megatron.core.ops.fp8.formats import FORMATS
from megatron.core.ops.fp8.quantize import note_largest, noted_largest
from megatron.core.ops.fp8.recipes import DelayedScaling, Fp8Settings, LinearSplit, Role, build_scaling

CPU = torch.device("cpu")


def delayed(history_len: int = 3, algo: str = "most_recent", margin: int = 0) -> DelayedScaling:
    settings = Fp8Settings("delayed", FORMATS["hybrid"], margin=margin, history_len=history_len, amax_algo=algo)
    scaling = build_scaling(settings, LinearSplit(), CPU)
    assert isinstance(scaling, DelayedScaling)
    return scaling


def factor(scaling: DelayedScaling, matrix: Tensor, role: Role = Role.INPUTS, records: bool = True) -> float:
    pair = scaling.quantize(matrix, role, rows=True, columns=False, records=records)
    assert pair.rows is not None
    return float(pair.rows.factors)


def test_each_recipe_has_its_factors() -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    shapes = {"tensorwise": (), "delayed": (), "rowwise": (256, 1), "blockwise": (256, 2)}
    for recipe, shape in shapes.items():
        scaling = build_scaling(Fp8Settings(recipe, FORMATS["hybrid"]), LinearSplit(), CPU)
        pair = scaling.quantize(x, Role.GRADIENTS, rows=True, columns=True, records=True)
        assert pair.rows is not None and pair.columns is not None
        assert pair.rows.factors.shape == pair.columns.factors.shape == shape
        assert pair.rows.values.dtype is torch.float8_e5m2
        weights = scaling.quantize(x, Role.WEIGHTS, rows=True, columns=False, records=True).rows
        assert weights is not None and weights.values.dtype is torch.float8_e4m3fn
        assert weights.factors.shape == ((2, 2) if recipe == "blockwise" else shape)


def test_before_the_first_step_a_tensor_has_its_own_scale() -> None:
    scaling = delayed()
    assert factor(scaling, torch.tensor([[-7.0, 2.0]])) == 7 / 448
    assert factor(scaling, torch.tensor([[3.5, 2.0]])) == 3.5 / 448
    assert scaling.take_seen().tolist() == [7.0, 0.0, 0.0]


def test_scales_are_those_of_the_last_step() -> None:
    scaling = delayed()
    scaling.add_step(torch.tensor([7.0, 14.0, 57344.0]))
    x = torch.tensor([[1.0, 28.0]])
    assert [factor(scaling, x, role) for role in Role] == [7 / 448, 14 / 448, 1.0]
    assert scaling.take_seen().tolist() == [28.0, 28.0, 28.0] and scaling.take_seen().tolist() == [0.0, 0.0, 0.0]
    scaling.add_step(torch.tensor([28.0, 0.0, 1.0]))
    assert scaling.amax_history.tolist() == [[28.0, 7.0, 0.0], [14.0, 14.0, 0.0], [1.0, 57344.0, 0.0]]
    assert factor(scaling, x) == 28 / 448
    large = delayed(algo="max", margin=1)
    for amax in (7.0, 3.5, 1.75, 0.875):
        large.add_step(torch.tensor([amax, amax, amax]))
    assert factor(large, x) == 2 * 3.5 / 448  # 7 has left the history


def test_evaluation_records_weights_alone() -> None:
    scaling = delayed()
    for role in Role:
        factor(scaling, torch.tensor([[2.0]]), role, records=False)
    assert scaling.take_seen().tolist() == [0.0, 2.0, 0.0]


def test_a_step_that_is_not_finite_repeats_the_step_before() -> None:
    scaling = delayed()
    scaling.add_step(torch.ones(3))
    factor(scaling, torch.tensor([[torch.nan, 2.0]]))
    scaling.add_step(scaling.take_seen())
    assert scaling.amax_history[0].tolist() == [1.0, 1.0, 0.0]


def test_the_history_stays_float32_and_is_read_again_after_a_load() -> None:
    scaling = delayed(1).to(torch.bfloat16)
    assert scaling.amax_history.dtype is torch.float32
    assert factor(scaling, torch.tensor([[3.5]])) == 3.5 / 448
    scaling.amax_history.data.fill_(7.0)
    scaling.forget()
    assert factor(scaling, torch.tensor([[3.5]])) == 7 / 448


def test_a_noted_value_stays_that_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "all_reduce", lambda tensor, group, op: tensor.mul_(4.0))
    group: Any = object()
    scaling = build_scaling(Fp8Settings("tensorwise", FORMATS["hybrid"]), LinearSplit(inputs=group), CPU)
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    note_largest(x, x.abs().max())
    pair = scaling.quantize(x, Role.INPUTS, rows=True, columns=False, records=True)
    noted = noted_largest(x)
    assert noted is not None and noted == x.abs().max()
    assert pair.rows is not None and float(pair.rows.factors) == pytest.approx(4.0 * float(noted) / 448.0)
