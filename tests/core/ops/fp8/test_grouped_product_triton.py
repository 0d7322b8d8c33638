"""The kernels of grouped products in fp8, in Triton's interpreter."""

import pytest
from support import fp8_grouped_kernels


@pytest.mark.parametrize("check", ["products", "weight_gradients"])
def test_the_kernel_agrees_with_its_definition(check: str) -> None:
    getattr(fp8_grouped_kernels, check)()
