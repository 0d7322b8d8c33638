"""The Triton kernel that merges attention blocks, in Triton's interpreter."""

import pytest
from support import triton_agreement


@pytest.mark.parametrize("check", ["merged_blocks"])
def test_the_kernel_agrees_with_its_reference(check: str) -> None:
    getattr(triton_agreement, check)()
