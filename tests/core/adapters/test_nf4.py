"""NF4: codes, decoded weights, products."""

import pytest
import torch

from megatron.core.adapters.nf4 import BLOCK, NUMBERS, Nf4Linear, Nf4Weight, nf4_bytes


def test_each_weight_is_the_nearest_number() -> None:
    weight = torch.randn(6, 2 * BLOCK, generator=torch.Generator().manual_seed(1))
    stored = Nf4Weight.of(weight)
    assert stored.packed.nbytes == nf4_bytes(weight.numel()) == 6 * BLOCK + 4 * 12
    for block, found in zip(weight.view(-1, BLOCK), stored.decode().view(-1, BLOCK), strict=True):
        scale = float(block.abs().max())
        for value, got in zip(block.tolist(), found.tolist(), strict=True):
            nearest = min(NUMBERS, key=lambda number: abs(number * scale - value))
            assert got == pytest.approx(nearest * scale, rel=1e-6, abs=1e-12)


def test_what_it_can_express_is_kept_and_zeros_too() -> None:
    weight = (torch.tensor(NUMBERS).repeat(8) * 3.0).view(2, BLOCK)
    assert torch.equal(Nf4Weight.of(weight).decode(), weight)
    assert not Nf4Weight.of(torch.zeros(1, BLOCK)).decode().any()


def test_product_and_gradient_are_those_of_the_decoded_weight() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(5, BLOCK, dtype=torch.float64, generator=generator)
    inputs = torch.randn(3, 2, BLOCK, dtype=torch.float64, generator=generator).requires_grad_()
    bias = torch.randn(5, dtype=torch.float64, generator=generator)
    stored = Nf4Weight.of(weight)
    output, expected = Nf4Linear(stored)(inputs, None, bias), inputs @ stored.decode().t() + bias
    above = torch.randn(output.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad(value, inputs, above)[0] for value in (output, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
