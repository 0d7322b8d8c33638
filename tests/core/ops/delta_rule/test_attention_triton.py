"""The kernels of the gated delta rule, in Triton's interpreter."""

import pytest
import torch
from support import delta_rule_kernels

from megatron.core.ops.delta_rule.attention import delta_rule_attention
from megatron.core.ops.delta_rule.attention_triton import delta_rule_attention_triton


@pytest.mark.parametrize("check", ["rows", "packed", pytest.param("published_widths", marks=pytest.mark.slow)])
def test_the_kernels_agree_with_their_definition(check: str) -> None:
    getattr(delta_rule_kernels, check)()


def test_types_that_the_kernels_do_not_compute_have_the_bits_of_the_definition() -> None:
    tensors = [tensor.double() for tensor in delta_rule_kernels.arguments(70, 1, (1, 2), (16, 16), 1.0)]
    assert torch.equal(
        delta_rule_attention_triton(*tensors, (16, 16), None), delta_rule_attention(*tensors, (16, 16), None)
    )
