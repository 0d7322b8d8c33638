"""The Triton kernel that finds the largest logits, in Triton's interpreter."""

from support import triton_agreement


def test_the_kernel_agrees_with_its_definition() -> None:
    triton_agreement.largest_logits()
