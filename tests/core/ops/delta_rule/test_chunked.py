"""The chunked gated delta rule against its definition, forward and backward."""

import pytest
import torch
from torch import Tensor

from megatron.core.ops.delta_rule.chunked import gated_delta_rule
from megatron.core.ops.delta_rule.recurrent import gated_delta_rule_recurrent


def arguments(length: int, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Returns random queries, keys (of length 1), values, decays, betas and a state, which all need gradients."""
    generator = torch.Generator().manual_seed(length)
    (groups, values), (dk, dv) = heads, widths

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys = torch.nn.functional.normalize(draw(length, 2, groups, dk), dim=-1)
    drawn = [draw(length, 2, groups, dk), keys, draw(length, 2, values, dv), -draw(length, 2, values).abs()]
    drawn += [draw(length, 2, values).sigmoid(), draw(2, values, dk, dv)]
    return [tensor.to(dtype).requires_grad_() for tensor in drawn]


DOCUMENTS = {
    "one": lambda length: None,
    "several": lambda length: torch.arange(length) // 3 + torch.arange(length) // 7,
    "as long as chunks": lambda length: torch.arange(length) // 4,
    "borders far apart": lambda length: torch.arange(length) // 11,
}


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("length", "size"), [(1, 4), (13, 4), (16, 4), (23, 64)])
def test_values_and_gradients_are_those_of_the_definition(length: int, size: int, documents: str) -> None:
    *inputs, state = arguments(length, (2, 6), (5, 3), torch.float64)
    document = DOCUMENTS[documents](length)
    found = gated_delta_rule(*inputs, document, state, chunk_size=size)
    wanted = gated_delta_rule_recurrent(*inputs, document, state)
    weights = [torch.randn(tensor.shape, dtype=torch.float64) for tensor in wanted]
    results = []
    for tensors in (found, wanted):
        torch.autograd.backward(tensors, weights)
        results.append([*tensors, *(tensor.grad for tensor in (*inputs, state))])
        for tensor in (*inputs, state):
            tensor.grad = None
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_strong_decays_neither_overflow_nor_vanish() -> None:
    query, key, value, decay, beta, _ = arguments(40, (1, 2), (4, 4), torch.float32)
    decay = (decay.detach() * 100).requires_grad_()
    found, _ = gated_delta_rule(query, key, value, decay, beta, chunk_size=16)
    wide = [tensor.detach().double() for tensor in (query, key, value, decay, beta)]
    torch.testing.assert_close(found.double(), gated_delta_rule_recurrent(*wide)[0], rtol=1e-5, atol=1e-5)
    found.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value, decay, beta))


def test_half_types_are_rounded_once() -> None:
    inputs = [tensor.detach() for tensor in arguments(33, (2, 2), (8, 8), torch.bfloat16)[:5]]
    found, state = gated_delta_rule(*inputs)
    wanted, _ = gated_delta_rule_recurrent(*(tensor.double() for tensor in inputs))
    assert found.dtype is torch.bfloat16 and state.dtype is torch.float32
    assert ((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-4).all()


def test_the_state_joins_two_halves_of_a_row() -> None:
    *inputs, _ = arguments(17, (1, 2), (4, 3), torch.float64)
    whole, last = gated_delta_rule(*inputs, chunk_size=5)
    first, state = gated_delta_rule(*(tensor[:9] for tensor in inputs), chunk_size=5)
    second, end = gated_delta_rule(*(tensor[9:] for tensor in inputs), state=state, chunk_size=5)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(end, last, rtol=1e-12, atol=1e-12)
