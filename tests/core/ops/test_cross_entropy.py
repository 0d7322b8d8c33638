"""Cross entropy: values, gradients, padding, smoothing, types, and its lean way with memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops import cross_entropy as module
from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.ops.head_loss import head_loss
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


def problem(t: int = 9, v: int = 11, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(t, v, dtype=torch.float64, generator=generator) * 3
    return logits.to(dtype).requires_grad_(), torch.randint(v, (t,), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("rows", [2, 1000])
def test_against_torch(smoothing: float, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._LOGITS_AT_ONCE, "cpu", rows * 11)
    logits, labels = problem()
    weight = torch.rand(9, dtype=torch.float64)
    expected = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad((expected * weight).sum(), logits)
    loss = cross_entropy(logits, labels, label_smoothing=smoothing)
    assert torch.allclose(loss, expected, rtol=1e-13)
    (ours,) = torch.autograd.grad((loss * weight).sum(), logits)
    assert torch.allclose(ours, gradient, rtol=1e-12, atol=1e-14)


def test_padded_columns_take_no_part() -> None:
    logits, labels = problem()
    padded = F.pad(logits.detach(), (0, 5), value=50.0).requires_grad_()
    loss = cross_entropy(padded, labels, 11)
    assert torch.allclose(loss, cross_entropy(logits, labels), rtol=1e-14)
    loss.sum().backward()
    assert not padded.grad[:, 11:].any() and padded.grad[:, :11].any()


def test_negative_labels_have_neither_loss_nor_gradient() -> None:
    logits, labels = problem()
    labels[4] = -100
    loss = cross_entropy(logits, labels)
    loss.sum().backward()
    assert loss[4] == 0 and not logits.grad[4].any() and logits.grad[3].any()


def test_large_logits_are_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1]))
    loss.sum().backward()
    assert loss.item() == 2e4 and logits.grad.tolist() == [[1.0, -1.0, 0.0]]


def test_half_logits_are_computed_in_float32() -> None:
    logits, labels = problem(v=300, dtype=torch.bfloat16)
    loss = cross_entropy(logits, labels)
    assert loss.dtype is torch.float32
    assert torch.allclose(loss, F.cross_entropy(logits.float(), labels, reduction="none"), rtol=1e-5)
    loss.sum().backward()
    assert logits.grad.dtype is torch.bfloat16


def test_overwritten_logits_serve_one_backward() -> None:
    logits, labels = problem()
    hidden = logits * 1.0
    loss = cross_entropy(hidden, labels, overwrite_logits=True).sum()
    loss.backward(retain_graph=True)
    expected = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), logits)[0]
    assert torch.allclose(logits.grad, expected)
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()


def test_head_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 5, dtype=torch.float64, generator=generator).requires_grad_() for n in (9, 14))
    bias = torch.randn(14, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(11, (9,), generator=generator)
    expected = F.cross_entropy((hidden @ weight.T + bias)[:, :11], labels, reduction="none")
    loss = head_loss(hidden, weight, bias, labels, 11)
    assert torch.allclose(loss, expected, rtol=1e-13)
    wanted = torch.autograd.grad(expected.sum(), [hidden, weight, bias])
    for a, b in zip(torch.autograd.grad(loss.sum(), [hidden, weight, bias]), wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_public_function() -> None:
    logits, labels = problem(t=6)
    loss = vocab_parallel_cross_entropy(logits.view(3, 2, 11), labels.view(3, 2))
    assert torch.allclose(loss, F.cross_entropy(logits, labels, reduction="none").view(3, 2))
