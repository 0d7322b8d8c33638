"""Mamba-2's recurrence in chunks against its definition, forward and backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.core.ops.ssd.chunked import ssd
from megatron.core.ops.ssd.recurrent import ssd_recurrent


def arguments(length: int, heads: int, groups: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns random x, step sizes, rates, B and C for two rows, which all need gradients."""
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    drawn = [draw(length, 2, heads, 3), draw(length, 2, heads).exp(), -draw(heads).exp()]
    drawn += [draw(length, 2, groups, 5), draw(length, 2, groups, 5)]
    return [tensor.to(dtype).requires_grad_() for tensor in drawn]


DOCUMENTS = {
    "one": lambda length: None,
    "several in a chunk": lambda length: torch.arange(length) // 3 + torch.arange(length) // 7,
    "as long as chunks": lambda length: torch.arange(length) // 4,
    "longer than chunks": lambda length: torch.arange(length) // 11,
}


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (13, 4), (16, 4), (23, 64)])
def test_values_and_gradients_are_those_of_the_definition(length: int, chunk: int, documents: str) -> None:
    inputs = arguments(length, heads=6, groups=2)
    document = DOCUMENTS[documents](length)
    results = []
    for tensors in (ssd(*inputs, document, chunk=chunk), ssd_recurrent(*inputs, document)):
        weights = [torch.linspace(-1.0, 1.0, tensor.numel(), dtype=torch.float64).view_as(tensor) for tensor in tensors]
        results.append([*tensors, *torch.autograd.grad(tensors, inputs, weights)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("compute", [ssd, ssd_recurrent])
def test_a_state_carries_a_row_on(compute: Callable[..., tuple[Tensor, Tensor]]) -> None:
    inputs = arguments(13, heads=6, groups=2)
    rate, cut = inputs.pop(2), 5
    whole, last = compute(*inputs[:2], rate, *inputs[2:])
    first, rest = ([tensor[part] for tensor in inputs] for part in (slice(cut), slice(cut, None)))
    before, state = compute(*first[:2], rate, *first[2:])
    after, end = compute(*rest[:2], rate, *rest[2:], state=state)
    torch.testing.assert_close(torch.cat([before, after]), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(end, last, rtol=1e-11, atol=1e-11)


def test_strong_decays_lose_no_digits() -> None:
    x, step, rate, b, c = arguments(40, 2, 1, torch.float32)
    with torch.no_grad():
        step[::5] *= 1000.0
    found, _ = ssd(x, step, rate, b, c, chunk=16)
    wanted, _ = ssd_recurrent(*(tensor.detach().double() for tensor in (x, step, rate, b, c)))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
    found.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (x, step, rate, b, c))


def test_half_types_are_rounded_once() -> None:
    inputs = [tensor.detach() for tensor in arguments(33, 2, 2, torch.bfloat16)]
    found, state = ssd(*inputs)
    wanted, _ = ssd_recurrent(*(tensor.double() for tensor in inputs))
    assert found.dtype is torch.bfloat16 and state.dtype is torch.float32
    assert ((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-4 * wanted.abs().max()).all()


def test_states_in_another_type() -> None:
    """--mamba-training-ssm-states-dtype: kept in that type, passed on in the wider one."""
    inputs = arguments(13, heads=6, groups=2)
    document = DOCUMENTS["longer than chunks"](13)
    results = {}
    for dtype in (None, torch.float64, torch.bfloat16):
        tensors = ssd(*inputs, document, chunk=4, states_dtype=dtype)
        weights = [torch.linspace(-1.0, 1.0, tensor.numel(), dtype=torch.float64).view_as(tensor) for tensor in tensors]
        results[dtype] = [*tensors, *torch.autograd.grad(tensors, inputs, weights)]
    for one, same, rounded in zip(*results.values(), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-12, atol=1e-12)  # no rounding, other gradient formulas
        torch.testing.assert_close(one, rounded, rtol=0.0, atol=0.02 * one.abs().max().item())
    (output, last, *_), (rounded, same, *_) = results[None], results[torch.bfloat16]
    assert not torch.equal(output, rounded) and torch.equal(last, same)  # they pass on without rounding


def test_states_in_bfloat16_are_kept_in_it() -> None:
    kept: list[torch.dtype] = []
    inputs = arguments(13, heads=6, groups=2)
    shape = (4, 2, 2, 3, 5, 3)  # [chunks, b, groups, heads of a group, n, p]

    def note(tensor: Tensor) -> Tensor:
        kept.extend([tensor.dtype] if tuple(tensor.shape) == shape else [])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ssd(*inputs, chunk=4, states_dtype=torch.bfloat16)
    assert kept == [torch.bfloat16]
