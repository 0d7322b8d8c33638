"""A linear layer that every rank holds whole."""

import pytest
import torch

from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.initializers import Normal
from megatron.core.parameters import info_of
from megatron.core.tensor_parallel.replicated import ReplicatedLinear


@pytest.mark.parametrize("skip_bias_add", [False, True])
def test_it_is_a_linear_layer(skip_bias_add: bool) -> None:
    config = ModelParallelConfig(use_cpu_initialization=True)
    layer = ReplicatedLinear(4, 3, config=config, init_method=Normal(1.0), skip_bias_add=skip_bias_add)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 5, 4)
    output, bias = layer(x)
    expected = torch.nn.functional.linear(x, layer.weight, None if skip_bias_add else layer.bias)
    torch.testing.assert_close(output, expected)
    assert bias is (layer.bias if skip_bias_add else None)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_summed_where_ranks_have_tokens_of_their_own(sequence_parallel: bool) -> None:
    config = ModelParallelConfig(
        use_cpu_initialization=True, sequence_parallel=sequence_parallel, tensor_model_parallel_size=2
    )
    layer = ReplicatedLinear(4, 3, config=config, init_method=Normal(1.0))
    axes = frozenset({"tp"} if sequence_parallel else ())
    assert all(info_of(parameter).partial_gradient_axes == axes for parameter in layer.parameters())
    layer.load_state_dict({**layer.state_dict(), "_extra_state": None})  # as Megatron-LM's layers save it
