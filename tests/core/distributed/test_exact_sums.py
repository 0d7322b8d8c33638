"""Sums of gradients as whole numbers."""

import functools

import pytest
import torch

from megatron.core.distributed.exact_sums import MEANS, MICRO_BATCHES, TOKEN_SUMS, ExactSum, FixedPoint, spread_bad_sums

CPU = torch.device("cpu")


def gradients(count: int = 7, numel: int = 1000) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(numel, generator=generator).mul(4).exp() * 1e-6
    return [torch.randn(numel, generator=generator) * sizes for _ in range(count)]


def summed(number: FixedPoint, parts: list[torch.Tensor]) -> torch.Tensor:
    total = ExactSum(number, parts[0].numel(), CPU)
    for part in parts:
        total.take(part.clone())
    assert not total.is_bad
    out = torch.empty(parts[0].numel())
    number.read(total.total, out)
    return out


@pytest.mark.parametrize("number", [MEANS, TOKEN_SUMS])
def test_a_sum_is_that_of_float64_and_does_not_depend_on_the_order(number: FixedPoint) -> None:
    parts = gradients()
    found, exact = summed(number, parts), torch.stack(parts).double().sum(0)
    assert torch.equal(found, summed(number, parts[::-1]))
    assert (found - exact).abs().le(exact.abs() * 2.0**-24 + len(parts) * 2.0 ** -(number.bits + 1)).all()
    rounded = [functools.reduce(torch.add, order) for order in (parts, parts[::-1])]
    assert not torch.equal(*rounded), "sums in float32 depend on the order"


def test_taking_zeroes_the_gradients() -> None:
    part = torch.ones(3)
    total = ExactSum(MEANS, 3, CPU)
    total.take(part)
    assert not part.any() and total.total.eq(2**MEANS.bits).all()
    total.reset()
    assert not total.total.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -MEANS.limit])
def test_what_does_not_fit_makes_the_norm_nan(value: float) -> None:
    total, fine = ExactSum(MEANS, 3, CPU), ExactSum(MEANS, 3, CPU)
    total.take(torch.tensor([0.0, value, 0.0]))
    fine.take(torch.full((3,), MEANS.limit * 0.99))
    shards = [torch.zeros(3), torch.zeros(2)]
    spread_bad_sums([fine.is_bad], shards, None)
    assert not torch.stack([shard.isnan().any() for shard in shards]).any()
    spread_bad_sums([fine.is_bad, total.is_bad], shards, None)
    assert all(shard[0].isnan() and shard[1:].eq(0).all() for shard in shards)


def test_the_most_and_largest_contributions_do_not_overflow() -> None:
    assert MEANS.limit * 2.0**MEANS.bits * MICRO_BATCHES <= 2**62
