"""The Triton kernel that joins the gradients of split columns, in Triton's interpreter."""

from support import elementwise_kernels


def test_the_kernel_agrees_with_its_reference() -> None:
    elementwise_kernels.columns()
