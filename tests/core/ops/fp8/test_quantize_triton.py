"""The kernels of quantisation in Triton's interpreter."""

import pytest
from support import fp8_kernels


@pytest.mark.parametrize("check", ["largest_values", "casts", "blocks", "values_that_are_not_finite"])
def test_the_kernel_agrees_with_its_definition(check: str) -> None:
    getattr(fp8_kernels, check)()
