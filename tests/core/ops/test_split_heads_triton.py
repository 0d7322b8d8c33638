"""The Triton kernel that joins the gradients of split heads, in Triton's interpreter."""

import pytest
from support import elementwise_kernels


@pytest.mark.parametrize("check", ["parts_of_heads", "rotated_parts_of_heads"])
def test_the_kernel_agrees_with_its_reference(check: str) -> None:
    getattr(elementwise_kernels, check)()
