"""Bias, dropout and residual in one function, under Megatron-LM's name."""

import pytest
import torch

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add


@pytest.mark.parametrize("fused", [False, True])
def test_evaluation_adds_bias_and_residual(fused: bool) -> None:
    x, bias, residual = torch.randn(4, 3), torch.randn(3), torch.randn(4, 3)
    add = get_bias_dropout_add(training=False, fused=fused)
    torch.testing.assert_close(add((x, bias), residual, 0.5), x + bias + residual)
    torch.testing.assert_close(add((x, None), residual, 0.5), x + residual)


def test_training_drops_by_torchs_generator() -> None:
    x, residual = torch.ones(200, 30), torch.zeros(200, 30)
    add = get_bias_dropout_add(training=True, fused=True)
    torch.manual_seed(1)
    first, second = add((x, None), residual, 0.25), add((x, None), residual, 0.25)
    torch.manual_seed(1)
    assert torch.equal(add((x, None), residual, 0.25), first) and not torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert first.eq(0).float().mean().item() == pytest.approx(0.25, abs=0.03)
