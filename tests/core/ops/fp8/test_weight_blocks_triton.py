"""Kernels that quantise flat parts of weights, in Triton's interpreter."""

from collections.abc import Callable

import pytest
from support import fp8_weights


@pytest.mark.fast("a_few_quantised_parts", "values_that_are_not_finite", "transposed")
@pytest.mark.parametrize("check", fp8_weights.CHECKS)
def test_the_kernel_agrees_with_its_definition(check: Callable[[], None]) -> None:
    check()
