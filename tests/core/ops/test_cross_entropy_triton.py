"""The Triton kernel of cross entropy, in Triton's interpreter."""

import pytest
from support import triton_agreement


@pytest.mark.parametrize("check", ["losses"])
def test_the_kernel_agrees_with_its_reference(check: str) -> None:
    getattr(triton_agreement, check)()
