"""The Triton kernel of AdamW over state in 8 and 16 bits, in Triton's interpreter."""

from support import elementwise_kernels


def test_the_kernel_agrees_with_its_reference() -> None:
    elementwise_kernels.stored_updates()
