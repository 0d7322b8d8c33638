"""The kernel of RMSNorm with a gate, in Triton's interpreter."""

from support import recurrent_kernels


def test_the_kernel_agrees_with_its_reference() -> None:
    recurrent_kernels.gated_norms()
