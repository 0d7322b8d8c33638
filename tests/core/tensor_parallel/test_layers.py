"""Public linear layers and embedding by themselves: what they compute, how they start, what they say they hold."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.core import tensor_parallel
from megatron.core.communication.collectives import PlannedGroup
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box, info_of
from megatron.core.tensor_parallel.layers import vocabulary_box
from megatron.core.tensor_parallel.storage import split_box

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


def test_row_parallel_linear() -> None:
    layer = tensor_parallel.RowParallelLinear(
        6, 8, config=CONFIG, init_method=nn.init.normal_, bias=True, input_is_parallel=True, skip_bias_add=False
    )
    output, bias = layer(x(3, 6))
    assert bias is None and torch.equal(output, F.linear(x(3, 6), layer.weight, layer.bias))
    assert info_of(layer.weight).sharded_axes == {"tp"} and not info_of(layer.bias).sharded_axes


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


def test_vocab_parallel_embedding() -> None:
    layer = tensor_parallel.VocabParallelEmbedding(
        10, 4, init_method=nn.init.normal_, config=CONFIG, vocab_padding_multiple=8
    )
    assert layer.weight.shape == (16, 4) and not layer.weight[10:].any()
    info = info_of(layer.weight)
    assert info.global_shape == (10, 4) and info.padding == 24
    ids = torch.tensor([[1, 9], [0, 1]])
    assert torch.equal(layer(ids), layer.weight[ids])


def test_megatron_lms_empty_extra_state_is_taken() -> None:
    layer = tensor_parallel.ColumnParallelLinear(6, 8, config=CONFIG, init_method=nn.init.normal_)
    layer.load_state_dict({**layer.state_dict(), "_extra_state": None})
    with pytest.raises(RuntimeError, match="_extra_state"):
        layer.load_state_dict({**layer.state_dict(), "_extra_state": torch.zeros(3)})


def place(rank: int, size: int) -> PlannedGroup:
    """Rank `rank` of `size`, without processes."""
    return PlannedGroup(tuple(range(size)), rank)


def test_boxes_follow_the_group() -> None:
    assert split_box((4, 6), 0, place(1, 2)) == Box((2, 0), (2, 6))
    assert split_box((2, 6, 5), 1, place(2, 3)) == Box((0, 4, 0), (2, 2, 5))
    # 50257 over two ranks: 25129 rows each, of which the last rank's last is padding.
    assert [vocabulary_box(50257, place(rank, 2)) for rank in (0, 1)] == [
        (25129, Box((0,), (25129,))),
        (25129, Box((25129,), (25128,))),
    ]
    assert vocabulary_box(3, place(3, 4), 2) == (1, Box((3,), (0,)))


def test_sizes_that_do_not_divide_are_named_with_those_that_do() -> None:
    init = {"config": CONFIG, "init_method": nn.init.normal_, "tp_group": place(0, 4)}
    with pytest.raises(UserError, match=r"10 is not divisible by 4 tensor parallel ranks; use 8 or 12"):
        tensor_parallel.ColumnParallelLinear(6, 10, **init)
    with pytest.raises(UserError, match=r"input_size.*: 3 is not divisible by 4 tensor parallel ranks; use 4"):
        tensor_parallel.RowParallelLinear(3, 8, bias=True, input_is_parallel=True, skip_bias_add=False, **init)


def test_linear_by_megatron_lms_name() -> None:
    x = torch.arange(12.0).view(3, 4)
    weight, bias = torch.ones(2, 4), torch.ones(2)
    result = tensor_parallel.linear_with_grad_accumulation_and_async_allreduce(x, weight, bias, False, False, False)
    assert torch.equal(result, x @ weight.T + bias)
