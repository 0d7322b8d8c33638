"""Triton kernels that choose experts, in Triton's interpreter."""

import pytest
from support import expert_kernels


@pytest.mark.parametrize("check", ["choices", "weights_of_choices", "routers", "sums_of_scores", "counts"])
def test_the_kernel_agrees_with_its_reference(check: str) -> None:
    getattr(expert_kernels, check)()
