"""The head: logits and losses of one rank."""

from typing import Any

import pytest
import torch
from support.tiny_models import tiny_config

from megatron.core.initializers import Normal
from megatron.core.models.common.language_model_head import LanguageModelHead

HIDDEN = torch.randn(3, 2, 8, dtype=torch.float64)


def head(**fields: Any) -> LanguageModelHead:
    config = tiny_config(hidden_size=8, **fields)
    return LanguageModelHead(8, 5, config=config, init_method=Normal(1.0), bias=False, vocab_padding_multiple=4)


def test_logits_are_scaled_bounded_and_without_padding() -> None:
    made = head(logit_scale=2.0, final_logit_softcapping=3.0)
    assert made.weight is not None and made.weight.shape == (8, 8)
    logits, bias = made(HIDDEN)
    torch.testing.assert_close(logits, 3.0 * torch.tanh(2.0 * HIDDEN @ made.weight[:5].t() / 3.0))
    assert bias is None


@pytest.mark.parametrize(("logit_dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_logits_in_another_type(logit_dtype: Any, expected: torch.dtype) -> None:
    """--output-logit-dtype"""
    made, labels = head(logit_dtype=logit_dtype), torch.tensor([[0, 4], [1, 2], [3, 3]])
    logits, _ = made(HIDDEN)
    plain, _ = head()(HIDDEN, made.weight)
    assert logits.dtype is expected and torch.equal(logits, plain.to(expected))
    losses, _ = made(HIDDEN, labels=labels)
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    torch.testing.assert_close(losses, wanted.view(3, 2))
    losses.sum().backward()
    assert made.weight is not None and made.weight.grad is not None and made.weight.grad.dtype is torch.float64


def test_a_loss_can_leave_the_weight_out_of_training() -> None:
    made = head()
    hidden = HIDDEN.clone().requires_grad_()
    made(hidden, labels=torch.zeros(3, 2, dtype=torch.int64), trains_weight=False)[0].sum().backward()
    assert made.weight is not None and made.weight.grad is None and torch.count_nonzero(hidden.grad)
