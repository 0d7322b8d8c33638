"""The kernels that quantise segments of rows, in Triton's interpreter."""

import pytest
from support import fp8_grouped_kernels


@pytest.mark.parametrize("check", ["largest_values", "casts", "by_largest", "blocks"])
def test_the_kernel_agrees_with_its_definition(check: str) -> None:
    getattr(fp8_grouped_kernels, check)()
