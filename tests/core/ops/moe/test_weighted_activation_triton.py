"""Triton kernels of experts' activations, in Triton's interpreter."""

import pytest
from support import expert_kernels


@pytest.mark.parametrize("check", ["activations", "nan_inputs", "recomputed_activation"])
def test_the_kernel_agrees_with_its_reference(check: str) -> None:
    getattr(expert_kernels, check)()
