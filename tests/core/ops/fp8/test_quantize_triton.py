"""The kernels of quantisation in Triton's interpreter."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import fp8_kernels
from torch import Tensor

from megatron.core.backends import LOCAL
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ops.fp8.quantize import largest_value
from megatron.core.ops.moe.weighted_activation_triton import weighted_activation_triton
from megatron.core.ops.norm_triton import rms_norm_with_residual_triton
from megatron.core.tokens import Tokens
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


@pytest.mark.parametrize(
    "check",
    ["largest_values", "noted_values", "noted_rows", "casts", "by_largest", "blocks", "values_that_are_not_finite"],
)
def test_the_kernel_agrees_with_its_definition(check: str) -> None:
    getattr(fp8_kernels, check)()


def two_layers(notes_largest: bool) -> tuple[list[Tensor], int]:
    """Returns the output and the gradients of two layers, and how many passes look for a largest value."""
    passes = []

    def counted(matrix: Tensor) -> Tensor:
        passes.append(matrix.shape)
        return largest_value(matrix)

    norm = partial(rms_norm_with_residual_triton, notes_largest=notes_largest)
    activation = partial(weighted_activation_triton, notes_largest=notes_largest)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=32,
        num_attention_heads=2,
        bf16=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        fp8="hybrid",
        fp8_recipe="tensorwise",
        use_cpu_initialization=True,
    )
    torch.manual_seed(0)
    backend = dataclasses.replace(
        LOCAL.with_operations(
            norms={"noting": {"rms_norm_with_residual": norm}}, experts={"noting": {"weighted_activation": activation}}
        ),
        fp8_kernels=dataclasses.replace(LOCAL.fp8_kernels, largest_value=counted),
    )
    layers = [TransformerLayer(config, get_gpt_layer_local_spec().submodules, n, backend=backend) for n in (1, 2)]
    hidden = inputs = torch.randn(16, 32, dtype=torch.bfloat16).requires_grad_()
    for layer in layers:
        hidden = layer(hidden, LayerInputs(Tokens(16, 1)))
    hidden.backward(torch.randn(hidden.shape).to(hidden.dtype))
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return [hidden.detach(), *(leaf.grad for leaf in (inputs, *parameters))], len(passes)


def test_noted_values_reach_the_linear_layers() -> None:
    expected, passes = two_layers(False)
    found, fewer = two_layers(True)
    assert all(map(torch.equal, found, expected))
    # Without notes: 8 weights, inputs and gradients. With: 8 weights; each layer's attention and the gradients of
    # queries, keys and values; and the last gradient.
    assert (passes, fewer) == (24, 13)
