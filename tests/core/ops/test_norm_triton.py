"""Triton kernels of norms, in Triton's interpreter."""

import pytest
from support import elementwise_kernels


@pytest.mark.parametrize("check", ["norms", "norms_of_views", "norms_with_residual"])
def test_the_kernel_agrees_with_its_reference(check: str) -> None:
    getattr(elementwise_kernels, check)()
