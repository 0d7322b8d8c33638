"""The kernel of RMSNorm and rotary positions of heads, in Triton's interpreter."""

from support import elementwise_kernels


def test_the_kernel_agrees_with_its_reference() -> None:
    elementwise_kernels.normed_positions()
