"""Triton kernels that permute tokens, in Triton's interpreter."""

import pytest
from support import expert_kernels


@pytest.mark.parametrize("check", ["moves", "places"])
def test_the_kernel_agrees_with_its_reference(check: str) -> None:
    getattr(expert_kernels, check)()
