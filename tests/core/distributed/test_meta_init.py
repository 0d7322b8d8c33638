"""Models built on the meta device get the values that they have when built directly."""

from types import SimpleNamespace

import pytest
import torch
from support.small_models import SmallModel
from torch import nn

from megatron.core.distributed.meta_init import materialize, materialize_rest
from megatron.core.exceptions import UserError
from megatron.core.parameters import name_parameters

CPU = torch.device("cpu")


def on_meta(**fields: int) -> SmallModel:
    with torch.device("meta"):
        return SmallModel(**fields)  # type: ignore[arg-type]


def test_values_are_those_of_a_model_built_directly() -> None:
    model, config = on_meta(padded=3), SimpleNamespace(seed=5)
    for parameter in model.parameters():
        assert parameter.is_meta
        held = [parameter]
        materialize(parameter, CPU, config)
        assert held[0] is parameter and not parameter.is_meta and parameter.requires_grad
    for got, expected in zip(model.parameters(), SmallModel(padded=3, seed=5).parameters(), strict=True):
        assert torch.equal(got, expected) and got.info.name == expected.info.name


def test_without_initialization_values_are_not_drawn() -> None:
    (weight,) = [p for p in on_meta(layers=1).parameters() if p.info.name == "layers.0.weight"]
    materialize(weight, CPU, SimpleNamespace(seed=5, perform_initialization=False))
    assert not weight.is_meta and not weight.any()


def test_parameters_with_memory_keep_their_values() -> None:
    model = SmallModel(seed=5)
    before = model.embedding.table.detach().clone()
    materialize_rest(model, CPU, SimpleNamespace(seed=6))
    assert torch.equal(model.embedding.table, before)


def test_what_has_no_value_to_be_found_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
        name_parameters(model)
        norm = nn.BatchNorm1d(2, affine=False)
    with pytest.raises(UserError, match=r"0\.weight was built on the meta device.*declare it"):
        materialize_rest(model, CPU, SimpleNamespace(seed=5))
    with pytest.raises(UserError, match="the buffer running_mean was built on the meta device"):
        materialize_rest(norm, CPU, SimpleNamespace(seed=5))
