"""The model of Hopper's fp8 units: which bits sums keep, and the limit of what they lose."""

import pytest
import torch
from support.hopper_fp8_sums import largest_possible_errors, sums_of_products
from torch import Tensor


def operands(squares: bool, k: int = 512) -> tuple[Tensor, Tensor]:
    """`squares`: all terms of the diagonal are positive, so that all that is dropped adds up."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(8, k, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    return left, left if squares else right


def one_row(*terms: float) -> Tensor:
    return torch.tensor([terms])


def test_integers_are_exact() -> None:
    left, right = (torch.arange(40.0).reshape(1, 40) % 7 - 3 + offset for offset in (0, 1))
    assert sums_of_products(left, right) == (left * right).sum()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_terms_lose_what_is_14_bits_below_the_largest_towards_zero(sign: float) -> None:
    kept, dropped = one_row(1.0, 2.0**-13), one_row(1.0, 2.0**-14, 2.0**-14)
    assert sums_of_products(sign * kept, torch.ones_like(kept)) == sign * (1 + 2.0**-13)
    assert sums_of_products(sign * dropped, torch.ones_like(dropped)) == sign


def test_products_are_shifted_by_the_exponents_of_their_factors() -> None:
    """1.5 * 1.5 has the exponent 0, although it is larger than 2; a factor below the normal numbers has theirs."""
    large, ones = one_row(1.5, -1.5, 2.0**-13), one_row(1.5, 1.5, 1.0)
    assert sums_of_products(large, ones) == 2.0**-13
    small, factors = (
        values.to(torch.float8_e4m3fn) for values in (one_row(2.0**-9, 2.0**-6), one_row(2.0**8, 2.0**-6))
    )
    assert sums_of_products(small, factors) == 2.0**-1  # the second term is 14 bits below 2^-6 * 2^8


def test_the_terms_of_an_instruction_are_added_to_the_sum_of_those_before() -> None:
    ones, small = torch.zeros(1, 64), torch.zeros(1, 64)
    ones[0, 0], small[0, 32:] = 1.0, 2.0**-14
    assert sums_of_products(ones + small, torch.ones(1, 64)) == 1.0
    assert sums_of_products((ones + small).flip(1), torch.ones(1, 64)) == 1.0 + 2.0**-9


def test_results_have_13_bits() -> None:
    halves = one_row(*[1.0] * 16, 2.0**-13)  # 2^-13 is a bit of the largest term, and 17 bits below the sum
    assert sums_of_products(halves, torch.ones_like(halves)) == 16.0


@pytest.mark.parametrize("squares", [False, True])
def test_sums_lose_less_than_the_limit(squares: bool) -> None:
    left, right = operands(squares)
    lost = (sums_of_products(left, right).double() - left.double() @ right.double().t()).abs()
    limit = largest_possible_errors(left, right)
    assert (lost <= limit).all() and lost.max() > limit.max() / 200


def test_sums_of_squares_lose_most() -> None:
    """Terms of both signs lose about equally on both sides; those of one sign do not."""
    errors = []
    for squares in (False, True):
        left, right = operands(squares, 2048)
        exact = left.double() @ right.double().t()
        errors.append(float((sums_of_products(left, right) - exact).norm() / exact.norm()))
    assert errors[0] < 0.003 and errors[1] > 0.015
