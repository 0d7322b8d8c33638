"""Triton kernels of dropout, in Triton's interpreter."""

import pytest
from support import triton_agreement


@pytest.mark.parametrize("check", ["masks", "bias_dropout_residual"])
def test_the_kernel_agrees_with_its_reference(check: str) -> None:
    getattr(triton_agreement, check)()
