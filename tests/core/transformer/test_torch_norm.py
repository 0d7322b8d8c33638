"""The norm of the local spec against torch's."""

from typing import Any

import pytest
import torch
from support.tiny_models import randomize, tiny_config

from megatron.core.parameters import info_of
from megatron.core.transformer.torch_norm import WrappedTorchNorm


def norm(**fields: Any) -> WrappedTorchNorm:
    config = tiny_config(hidden_size=8, **fields)
    made = WrappedTorchNorm(config, 8, 1e-5)
    randomize(made)
    return made


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_both_kinds(kind: str, zero_centered: bool) -> None:
    made = norm(normalization=kind, layernorm_zero_centered_gamma=zero_centered)
    x = torch.randn(3, 8, dtype=torch.float64)
    weight = made.weight + (1.0 if zero_centered else 0.0)
    if kind == "LayerNorm":
        expected = torch.nn.functional.layer_norm(x, (8,), weight, made.bias, 1e-5)
    else:
        assert made.bias is None
        expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    torch.testing.assert_close(made(x), expected)
    normed, residual = made(x, with_residual=True)
    assert torch.equal(normed, made(x)) and torch.equal(residual, x)


def test_parameters_that_a_config_leaves_out() -> None:
    assert {name for name, _ in norm(norm_bias=False).named_parameters()} == {"weight"}
    assert not list(norm(norm_affine=False).parameters())


def test_the_result_has_the_type_of_the_models_weights() -> None:
    x = torch.randn(3, 8)
    assert norm()(x).dtype is norm(norm_affine=False)(x).dtype is torch.float64
    normed, residual = norm(norm_affine=False)(x, with_residual=True)
    assert normed.dtype is torch.float64 and residual.dtype is torch.float32
    parallel = norm(tensor_model_parallel_size=2, sequence_parallel=True)
    assert info_of(parallel.weight).partial_gradient_axes == {"tp"}
