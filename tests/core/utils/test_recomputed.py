"""Functions that are computed again in backward: what is kept, what is computed how often, equal results."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.utils import recomputed as module
from megatron.core.utils.recomputed import DiscardedResults, Recomputed


def saved_by(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output of a function, and the tensors that autograd saves."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        return function(*inputs), saved


def leaf(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


class Counted:
    """exp(sin(x)) * scale, and how often it was computed."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return x.sin().exp() * scale


def test_a_recomputed_function_keeps_its_arguments_alone() -> None:
    x, function = leaf(5), Counted()
    expected = torch.autograd.grad(function(x, scale=3.0).sum(), x)[0]
    output, saved = saved_by(lambda x: Recomputed(function)(x, scale=3.0), x)
    assert [tensor.data_ptr() for tensor in saved] in ([x.data_ptr()], [])
    function.calls = 0
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected) and function.calls == 1


def test_without_gradients_nothing_is_recomputed() -> None:
    function = Counted()
    with torch.no_grad():
        output = Recomputed(function)(leaf(5))
    assert not output.requires_grad and function.calls == 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_arguments_are_spread_over_a_group(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Each rank keeps a part; the parts of all ranks make the tensor again."""
    x = torch.arange(10.0).view(2, 5)
    monkeypatch.setattr(module, "group_size", lambda group: ranks)
    recomputed, shares = Recomputed(Counted(), spread_over="group"), []
    for rank in range(ranks):
        monkeypatch.setattr(module, "group_rank", lambda group, rank=rank: rank)
        shares.append(recomputed._keep(x))
    assert {share.flat.numel() for share in shares} == {-(-10 // ranks)}
    monkeypatch.setattr(module, "gather_rows", lambda rows, group: torch.cat([share.flat for share in shares]))
    assert torch.equal(recomputed._give(shares[0]), x)


def norm(x: Tensor) -> Tensor:
    return x / x.pow(2).mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("contiguous", [True, False])
def test_an_output_is_saved_as_its_argument(contiguous: bool) -> None:
    weight = leaf(4, 4)
    x = leaf(3, 4) if contiguous else leaf(4, 3).t()
    calls = []

    def counted_norm(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return norm(x)

    def product(x: Tensor) -> Tensor:
        return first(x) @ weight

    discarded = DiscardedResults(product)
    first = discarded.discard(counted_norm)
    output = discarded(x)
    assert calls == [True]
    gradients = torch.autograd.grad(output.sum(), [x, weight])
    assert calls == [True, False]
    for found, expected in zip(gradients, torch.autograd.grad((norm(x) @ weight).sum(), [x, weight]), strict=True):
        assert torch.equal(found, expected)


def test_other_tensors_of_the_same_call_are_kept() -> None:
    x, weight = leaf(3, 4), leaf(4, 4)

    def product(x: Tensor) -> Tensor:
        return (discarded.compute(norm, x) @ weight).exp()  # exp saves its own result

    discarded = DiscardedResults(product)
    expected = torch.autograd.grad((norm(x) @ weight).exp().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(discarded(x).sum(), x)[0], expected)


def test_nothing_is_remembered_after_a_call() -> None:
    def within(x: Any) -> Tensor:
        discarded.compute(norm, x)
        raise ValueError("inside")

    discarded = DiscardedResults(within)
    with pytest.raises(ValueError, match="inside"):
        discarded(leaf(2, 2))
    assert discarded._made == []


def test_results_are_computed_once_and_let_go() -> None:
    calls = []

    def function(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        calls.append(torch.is_grad_enabled())
        y = x * factor
        return y[:, :2], y.exp()

    def within(a: Tensor, b: Tensor) -> Tensor:
        return (a.t() @ a).sum() * (b * b).sum()

    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(within(*function(x, 0.3)), x)[0]
    discarded = DiscardedResults(within)
    output = discarded(*discarded.compute(function, x, 0.3))
    calls.clear()
    for _ in range(2):  # a graph that is kept gives them twice
        assert torch.equal(torch.autograd.grad(output, x, retain_graph=True)[0], expected)
    assert calls == [False, False]
    with torch.no_grad():
        assert discarded(*discarded.compute(function, x, 0.3)).item() == output.item()


@pytest.mark.slow
def test_the_first_call_leaves_no_tensor_to_the_garbage_collector() -> None:
    """Torch's compiler, if it is imported in this call, keeps the frames of all callers."""
    code = """
import gc, torch
from megatron.core.utils.recomputed import Recomputed
gc.disable()
function = Recomputed(lambda x: x.sin().exp())

def caller():
    local = torch.ones(8, requires_grad=True)
    function(local * 2).sum().backward()

gc.collect()
caller()
gc.set_debug(gc.DEBUG_SAVEALL)
gc.collect()
assert not any(isinstance(each, torch.Tensor) for each in gc.garbage), "a tensor waits for the garbage collector"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
