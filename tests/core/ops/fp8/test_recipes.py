"""Scales of the recipes, and the history of delayed scaling."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks
from torch import Tensor

from megatron.core.ops.fp8 import recipes
from megatron.core.ops.fp8.block_recipes import build_scaling
from megatron.core.ops.fp8.formats import FORMATS, scale_for
from megatron.core.ops.fp8.grouped import Segments
from megatron.core.ops.fp8.micro_batches import MicroBatches
from megatron.core.ops.fp8.quantize import note_largest, noted_largest
from megatron.core.ops.fp8.recipes import DelayedScaling, Fp8Settings, LinearSplit, Role, finish_step
from megatron.core.utils.torch_private import TorchDispatchMode

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
    shapes = {"tensorwise": (), "delayed": (), "blockwise": (256, 2)}
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


KINDS = [
    ("hybrid", 0, 3, "max", 1 / 3),
    ("e4m3", 0, 3, "max", 1 / 3),
    ("hybrid", 2, 3, "max", 1 / 3),
    ("hybrid", 0, 1, "max", 1 / 3),
    ("hybrid", 0, 3, "most_recent", 1 / 3),
    ("hybrid", 0, 3, "max", 1.0),
]
"""Formats, margin, length of the history, how it gives a scale, and the share of a rank's gradients."""


def layers_of(kinds: list[Any]) -> list[DelayedScaling]:
    """Two layers of each kind: first all dense ones, then experts."""
    layers: list[Any] = []
    for formats, margin, length, algo, share in kinds:
        settings = Fp8Settings("delayed", FORMATS[formats], margin, length, algo)
        layers.append(build_scaling(settings, LinearSplit(), CPU))
        layers.append(build_scaling(settings, LinearSplit(), CPU, MicroBatches((0, 1))))
        for layer in layers[-2:]:
            layer.gradient_share = share
    return layers[::2] + layers[1::2]


def largest_values(layers: int, step: int, ranks: int = 1) -> Tensor:
    """[ranks, layers, 3]: small, large, zero, and some that are not finite."""
    values = torch.randn(ranks, layers, 3, generator=torch.Generator().manual_seed(step)).mul_(9.0).exp2_()
    values.view(-1)[step::7] = (0.0, torch.inf, torch.nan, 1e-44)[step % 4]
    return values


def see(layers: list[DelayedScaling], values: Tensor) -> None:
    for layer, of_roles in zip(layers, values, strict=True):
        for role in Role:
            layer.seen_of(role).copy_(of_roles[role])


def expected_step(layer: DelayedScaling, history: list[list[Tensor]], seen: Tensor) -> tuple[list[list[Tensor]], Any]:
    """The definition, for one layer and one value at a time: the next history [3][steps] and its scales."""
    after, scales = [], []
    for role in Role:
        share = torch.tensor(layer.gradient_share if role is Role.GRADIENTS else 1.0)
        found = [value * share for value in seen[:, role] if value.isfinite()]  # of all ranks
        latest = max([torch.tensor(0.0), *found])
        after.append([latest if latest > 0 else history[role][0], *history[role][:-1]])
        amax = after[role][0] if layer.settings.amax_algo == "most_recent" else max(after[role])
        scales.append(scale_for(amax / share, layer.settings.dtype(role), layer.settings.margin))
    return after, torch.stack(scales)


def addresses(layers: list[DelayedScaling]) -> list[int]:
    """Those of largest values, scales and factors, which CUDA graphs keep."""
    inputs = Role.INPUTS
    return [at.data_ptr() for each in layers for at in (each.seen_of(inputs), scales_of(each), each.factor_of(inputs))]


def scales_of(layer: DelayedScaling) -> Tensor:
    assert layer.refresh() and layer._scales is not None
    return layer._scales


def compare_steps_with_the_definition() -> None:
    """Takes steps with layers of several kinds. Ranks see different values."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    layers, first_addresses = layers_of(KINDS), None
    histories: list[Any] = [[[torch.tensor(0.0)] * layer.settings.history_len for _ in Role] for layer in layers]
    for step in range(6):
        values = largest_values(len(layers), step, ranks)
        see(layers, values[rank])
        finish_step(layers, dist.group.WORLD if ranks > 1 else None)
        for number, layer in enumerate(layers):
            histories[number], scales = expected_step(layer, histories[number], values[:, number])
            assert torch.equal(layer.amax_history, torch.tensor(histories[number])), (step, number)
            assert torch.equal(scales_of(layer), scales), (step, number)
            assert torch.equal(torch.stack([layer.factor_of(role) for role in Role]), 1.0 / scales), (step, number)
            alone = copy.deepcopy(layer)
            alone.forget()  # as after a load: the scales from the history alone
            assert torch.equal(scales_of(alone), scales), (step, number)
            assert all(layer.seen_of(role) == 0.0 for role in Role)
        first_addresses = first_addresses or addresses(layers)
    assert first_addresses == addresses(layers)


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_layers_take_a_step_as_each_alone(ranks: int) -> None:
    if ranks == 1:
        compare_steps_with_the_definition()
    else:
        run_on_ranks(compare_steps_with_the_definition, ranks)


def test_factors_have_addresses_that_cublas_takes() -> None:
    """On an H200 cuBLAS refuses factors at addresses that do not divide by 16."""
    layers = layers_of(KINDS)
    see(layers, torch.full((len(layers), 3), 2.0))
    finish_step(layers)
    assert all(layer.factor_of(role).data_ptr() % 16 == 0 for layer in layers for role in Role)


def test_layers_that_are_copied_or_loaded_take_their_own_steps() -> None:
    layers = layers_of(KINDS)
    see(layers, torch.full((len(layers), 3), 2.0))
    finish_step(layers)
    copies = copy.deepcopy(layers)
    for layer in copies:
        layer.load_state_dict({"amax_history": torch.full_like(layer.amax_history, 8.0)})
        layer.forget()
    see(layers, torch.full((len(layers), 3), 4.0))
    finish_step(layers)
    for layer, copied in zip(layers, copies, strict=True):
        assert layer.scale_of(Role.INPUTS) == 2 * copied.scale_of(Role.INPUTS)  # type: ignore[operator]
        assert (copied.amax_history == 8.0).all() and layer.amax_history[0, 0] == 4.0
    finish_step(copies)
    assert all((copied.amax_history == 8.0).all() for copied in copies)  # they saw nothing, which repeats a step


def test_a_quantised_weight_keeps_its_factor() -> None:
    one, weights = torch.ones(16, 16), Role.WEIGHTS
    for layer, segments in zip(layers_of(KINDS[:1]), (None, Segments.of_weight(one[None])), strict=True):
        layer.add_step(torch.full((3,), 448.0))
        kept = layer.quantize(one, weights, segments, rows=True, columns=True, records=True)
        layer.add_step(torch.full((3,), 2 * 448.0))
        assert layer.factor_of(weights) == 2.0 and kept.rows.factors == kept.columns.factors == 1.0


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Counts the operations inside the context."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_the_number_of_operations_of_a_step_does_not_grow_with_the_layers() -> None:
    counts = []
    for number in (1, 40):
        layers = layers_of(KINDS[:1] * number)
        see(layers, torch.ones(len(layers), 3))
        finish_step(layers)  # the first one allocates
        with Operations() as step:
            finish_step(layers)
        with Operations() as first_use:
            assert all(layer.refresh() for layer in layers)
        assert first_use.count == len(layers)  # views of the scales, which are there already
        counts.append(step.count)
    assert counts[0] == counts[1] > 0
