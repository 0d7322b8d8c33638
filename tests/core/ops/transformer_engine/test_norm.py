"""Norms by Transformer Engine (a stand-in computes)."""

import pytest
import torch
from support import fake_transformer_engine as fake
from torch import nn

from megatron.core.ops.norm import layer_norm, rms_norm
from megatron.core.ops.transformer_engine.norm import EngineNorms

NORMS = EngineNorms(fake.FAKE)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_norms(kind: str, zero_centered: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 2, 16), (16,), (16,))
    )
    parameters = [nn.Parameter(weight), nn.Parameter(bias)][: 2 if kind == "layer_norm" else 1]
    arguments = [x.requires_grad_(), *parameters]
    reference = {"layer_norm": layer_norm, "rms_norm": rms_norm}[kind]
    results = []
    for norm in (reference, getattr(NORMS, kind)):
        output = norm(*arguments, 1e-5, zero_centered)
        results.append([output, *torch.autograd.grad(output, arguments, torch.cos(output.detach()))])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert parameters[0].engine_norm is not None


def test_other_types_and_missing_weights_are_ours() -> None:
    x, weight = torch.randn(3, 8, dtype=torch.float64), nn.Parameter(torch.ones(8))
    torch.testing.assert_close(NORMS.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(NORMS.layer_norm(x, None, None, 1e-5), layer_norm(x, None, None, 1e-5))
    assert not hasattr(weight, "engine_norm")
    computed = (2 * nn.Parameter(torch.ones(8, dtype=torch.float64))).requires_grad_()
    torch.testing.assert_close(NORMS.rms_norm(x, computed, 1e-5), rms_norm(x, computed, 1e-5))
    assert not hasattr(computed, "engine_norm")
