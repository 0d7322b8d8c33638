"""The loops over chunks, in Triton's interpreter."""

import torch
from support.delta_rule_kernels import arguments, documents

from megatron.core.ops.delta_rule.attention import betas, log_decays, split_heads_of_unit_length
from megatron.core.ops.delta_rule.attention_triton import _Call, _factors, _scan
from megatron.core.ops.delta_rule.recurrent import gated_delta_rule_recurrent


def test_states_before_chunks_are_those_of_the_definition() -> None:
    mixed, fading, strength, rate, bias = arguments(150, 2, (1, 2), (16, 16), 1.0)
    document = documents(150, 100, 60)
    call = _Call(mixed, fading, strength, rate, bias, document, 16, 16)
    states, corrections = torch.empty(4, 3, 16, 16), torch.empty(4, 3, 64, 16)
    _scan(call, _factors(call), mixed, states, corrections, keeps_states=True)
    heads, decay = split_heads_of_unit_length(mixed, (16, 16)), log_decays(fading, rate, bias)
    inputs = [tensor.double() for tensor in (*heads, decay, betas(strength))]
    for chunk in (1, 2):
        until = [tensor[: chunk * 64] for tensor in inputs]
        _, expected = gated_delta_rule_recurrent(*until, document[: chunk * 64])
        torch.testing.assert_close(states[:, chunk].double(), expected.flatten(0, 1), rtol=1e-4, atol=1e-5)
    assert not states[:, 0].any()
