"""The linear layers around attention: sizes, initialisation, biases, and what is refused."""

from typing import Any

import pytest
import torch
from support.tiny_models import tiny_config
from torch import nn

from megatron.core.backends import LOCAL
from megatron.core.communication.collectives import PlannedGroup
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box, info_of
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention_projections import build_heads_projection, build_output_projection
from megatron.core.transformer.transformer_config import TransformerConfig


def config(**settings: Any) -> TransformerConfig:
    return tiny_config(hidden_size=8, init_method_std=0.5, **settings)


def heads(group: Any = None, spec: Any = ColumnParallelLinear, **options: Any) -> nn.Module:
    given = {"bias": True, "name": "qkv", "tp_group": group, "backend": LOCAL} | options
    return build_heads_projection(spec, config(), 8, (4, 3, 2), **given)


def test_a_rank_computes_its_own_heads() -> None:
    layer = heads(PlannedGroup((0, 1), 1))
    assert layer.weight.shape == (12, 8) and layer.bias.shape == (12,)
    info = info_of(layer.weight)
    assert info.global_shape == (4, 3, 2, 8) and info.box == Box((2, 0, 0, 0), (2, 3, 2, 8))


def test_one_rank_computes_all_heads() -> None:
    layer = heads(bias=False)
    assert layer.bias is None
    output, bias = layer(torch.ones(5, 8, dtype=torch.float64))
    assert output.shape == (5, 24) and bias is None


def test_a_whole_input_needs_a_column_parallel_layer() -> None:
    class Other(nn.Module):
        """Not one of ours."""

    with pytest.raises(UserError, match="Other as linear_kv of a layer spec: with tensor parallelism it must be"):
        heads(PlannedGroup((0, 1), 0), spec=Other, name="kv", input_is_whole=True)
    assert isinstance(heads(PlannedGroup((0, 1), 0), input_is_whole=True), ColumnParallelLinear)


@pytest.mark.parametrize(
    ("settings", "has_bias"),
    [
        ({}, True),
        ({"add_bias_linear": False}, False),
        ({"attention_output_bias": False}, False),
        ({"add_bias_linear": False, "attention_output_bias": True}, True),
    ],
)
def test_the_output_projection_follows_the_config(settings: dict[str, Any], has_bias: bool) -> None:
    layer = build_output_projection(RowParallelLinear, config(**settings), 6, None, LOCAL)
    assert layer.weight.shape == (8, 6) and (layer.bias is not None) == has_bias
    output, bias = layer(torch.ones(5, 6, dtype=torch.float64))
    assert output.shape == (5, 8) and (bias is not None) == has_bias  # the bias is added later


def test_weights_of_the_output_are_scaled_by_depth() -> None:
    torch.manual_seed(1)
    layer = build_output_projection(RowParallelLinear, config(), 1024, None, LOCAL)
    assert float(layer.weight.detach().std()) == pytest.approx(0.5 / 2, rel=0.05)  # std / sqrt(2 * layers)
