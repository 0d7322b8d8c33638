"""The Triton kernels of an embedding's gradient, in Triton's interpreter."""

import pytest
from support import elementwise_kernels


@pytest.mark.parametrize("check", ["table_rows"])
def test_the_kernel_agrees_with_its_reference(check: str) -> None:
    getattr(elementwise_kernels, check)()
