"""Descriptors: names, boxes, initial values of any part of a tensor, main_grads."""

import pytest
import torch
from torch import nn

from megatron.core.initializers import Constant, Normal
from megatron.core.parameters import (
    Box,
    ParameterInfo,
    canonical_index,
    canonical_name,
    canonical_names,
    declare,
    info_of,
    initialize_parameters,
    name_parameters,
)


class Layer(nn.Module):
    def __init__(self, number: int, rows: Box | None = None) -> None:
        super().__init__()
        self.canonical_index = number
        shape = (8, 6) if rows is None else rows.shape
        self.weight = declare(nn.Parameter(torch.empty(shape)), Normal(0.5), global_shape=(8, 6), box=rows)
        self.bias = declare(nn.Parameter(torch.empty(8)), Constant(3.0))


class Model(nn.Module):
    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in numbers)
        self.tied = self.layers[0].weight


def named(numbers: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    model = Model(numbers)
    name_parameters(model)
    initialize_parameters(model, seed)
    return {info_of(parameter).name: parameter.detach() for parameter in model.parameters()}


def test_layers_go_by_their_number_over_the_whole_model() -> None:
    model = Model([4, 5])
    names = [name for name, _ in canonical_names(model)]
    # A tied parameter is met once, under its first name.
    assert names == ["tied", "layers.4.bias", "layers.5.weight", "layers.5.bias"]


def test_a_stage_holds_the_values_that_the_whole_model_has() -> None:
    whole, stage = named([0, 1, 2, 3]), named([2, 3])
    for name in ("layers.3.weight", "layers.3.bias"):
        assert torch.equal(whole[name], stage[name])
    assert not torch.equal(whole["layers.1.weight"], whole["layers.2.weight"])
    assert not torch.equal(whole["layers.1.weight"], named([0, 1, 2, 3], seed=2)["layers.1.weight"])
    assert (whole["layers.1.bias"] == 3.0).all()


def test_indices_of_a_box() -> None:
    shape, box = (3, 4, 5), Box((1, 1, 2), (2, 3, 2))
    every = torch.arange(60).view(shape)
    expected = every[1:3, 1:4, 2:4].reshape(-1)
    info = ParameterInfo(shape, box, Constant(0.0))
    assert torch.equal(canonical_index(info, 0, box.numel), expected)
    assert torch.equal(canonical_index(info, 5, 4), expected[5:9])


def test_padding_starts_at_zero_and_belongs_to_no_index() -> None:
    weight = declare(nn.Parameter(torch.full((20, 4), 9.0)), Normal(1.0), global_shape=(17, 4))
    module = nn.Module()
    module.weight = weight
    name_parameters(module)
    initialize_parameters(module, 1)
    assert info_of(weight).padding == 12
    assert (weight[17:] == 0).all() and (weight[:17] != 0).all()


def test_what_decays() -> None:
    matrix, vector = (
        declare(nn.Parameter(torch.empty(2, 2)), Normal(1.0)),
        declare(nn.Parameter(torch.empty(2)), Normal(1.0)),
    )
    assert info_of(matrix).decays and not info_of(vector).decays
    fact = ParameterInfo((2, 2), Box.whole((2, 2)), Normal(1.0), name="experts.bias")
    assert not fact.decays


def test_an_undeclared_parameter_is_whole_and_keeps_its_value() -> None:
    linear = nn.Linear(3, 3)
    before = linear.weight.clone()
    name_parameters(linear)
    initialize_parameters(linear, 1)
    assert torch.equal(linear.weight, before)
    assert info_of(linear.weight).box == Box.whole((3, 3)) and info_of(linear.weight).name == "weight"


@pytest.mark.parametrize(
    ("part_of", "name"),
    [
        ("", "decoder.experts.local_experts.3.linear_fc1.weight"),
        ("embedding.weight", "embedding.weight"),
        (".other", "decoder.experts.local_experts.3.linear_fc1.other"),
        ("....linear_fc1.weight", "decoder.experts.linear_fc1.weight"),
    ],
)
def test_a_parameter_may_be_a_part_of_one_that_is_named_elsewhere(part_of: str, name: str) -> None:
    info = ParameterInfo((1,), Box.whole((1,)), Constant(0.0), part_of=part_of)
    assert canonical_name("decoder.experts.local_experts.3.linear_fc1.weight", info) == name
