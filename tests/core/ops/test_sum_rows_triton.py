"""The Triton kernel of sums over rows, in Triton's interpreter."""

import pytest
from support import elementwise_kernels


@pytest.mark.parametrize("check", ["sums"])
def test_the_kernel_agrees_with_its_reference(check: str) -> None:
    getattr(elementwise_kernels, check)()
