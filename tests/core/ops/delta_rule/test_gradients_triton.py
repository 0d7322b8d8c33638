"""The gradients of chunks, in Triton's interpreter."""

import torch
from support.delta_rule_kernels import arguments, documents, results

from megatron.core.ops.delta_rule.attention_triton import delta_rule_attention_triton


def test_a_decay_across_a_border_of_documents_has_no_gradient_not_even_rounding() -> None:
    tensors, document = arguments(150, 1, (1, 2), (16, 16), 1.0), documents(150, 23, 128)
    fading = results(delta_rule_attention_triton, tensors, (16, 16), document)[2]
    border = torch.cat([torch.tensor([True]), document[1:] != document[:-1]])
    assert not fading[border].any() and fading[~border].all()
