"""The Triton kernel that places experts, in Triton's interpreter."""

from support import expert_kernels


def test_the_kernel_agrees_with_its_reference() -> None:
    expert_kernels.placements()
