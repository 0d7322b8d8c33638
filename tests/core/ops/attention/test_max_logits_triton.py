"""The Triton kernel that finds the largest logits, in Triton's interpreter."""

import pytest
from support import triton_agreement


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_kernel_agrees_with_its_definition(every: int) -> None:
    triton_agreement.largest_logits(every)
