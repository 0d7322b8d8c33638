"""Public linear layers by themselves: what they compute, how they start, and what they refuse."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.core import tensor_parallel
from megatron.core.communication.collectives import PlannedGroup
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.exceptions import UserError

CONFIG = ModelParallelConfig(fp64=True, use_cpu_initialization=True)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("skip_bias_add", [False, True])
def test_column_parallel_linear(skip_bias_add: bool) -> None:
    torch.manual_seed(0)
    layer = tensor_parallel.ColumnParallelLinear(
        6, 8, config=CONFIG, init_method=nn.init.normal_, skip_bias_add=skip_bias_add
    )
    with torch.no_grad():
        layer.bias.copy_(x(8))
    output, bias = layer(x(3, 2, 6))
    assert (bias is layer.bias) == skip_bias_add
    expected = F.linear(x(3, 2, 6), layer.weight, None if skip_bias_add else layer.bias)
    assert torch.equal(output, expected)
    given, _ = layer(x(3, 2, 6), weight=torch.zeros(4, 6, dtype=torch.float64) if skip_bias_add else layer.weight)
    assert given.shape[-1] == (4 if skip_bias_add else 8)


def test_a_lone_layer_starts_with_its_init_method_on_the_default_generator() -> None:
    torch.manual_seed(5)
    layer = tensor_parallel.ColumnParallelLinear(6, 8, config=CONFIG, init_method=nn.init.xavier_normal_)
    torch.manual_seed(5)
    assert torch.equal(layer.weight, nn.init.xavier_normal_(torch.empty(8, 6, dtype=torch.float64)))
    assert not layer.bias.any()


def test_weights_may_be_left_to_the_caller() -> None:
    layer = tensor_parallel.ColumnParallelLinear(
        6, 8, config=CONFIG, init_method=nn.init.normal_, bias=False, skip_weight_param_allocation=True
    )
    assert layer.weight is None and not layer.state_dict()


def test_megatron_lms_empty_extra_state_is_taken() -> None:
    layer = tensor_parallel.ColumnParallelLinear(6, 8, config=CONFIG, init_method=nn.init.normal_)
    layer.load_state_dict({**layer.state_dict(), "_extra_state": None})
    with pytest.raises(RuntimeError, match="_extra_state"):
        layer.load_state_dict({**layer.state_dict(), "_extra_state": torch.zeros(3)})


def test_sizes_that_do_not_divide_are_named_with_those_that_do() -> None:
    init = {"config": CONFIG, "init_method": nn.init.normal_, "tp_group": PlannedGroup((0, 1, 2, 3), 0)}
    with pytest.raises(UserError, match=r"10 is not divisible by 4 tensor parallel ranks; use 8 or 12"):
        tensor_parallel.ColumnParallelLinear(6, 10, **init)
    with pytest.raises(UserError, match=r"input_size.*: 3 is not divisible by 4 tensor parallel ranks; use 4"):
        tensor_parallel.RowParallelLinear(3, 8, bias=True, input_is_parallel=True, skip_bias_add=False, **init)
