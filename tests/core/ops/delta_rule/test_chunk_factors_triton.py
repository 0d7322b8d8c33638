"""The factors of chunks, in Triton's interpreter."""

import torch
from support.delta_rule_kernels import arguments

from megatron.core.ops.delta_rule.attention import betas, log_decays, split_heads_of_unit_length
from megatron.core.ops.delta_rule.attention_triton import _Call, _factors


def test_the_triangle_of_a_chunk_is_inverted_also_if_all_keys_are_alike() -> None:
    mixed, fading, strength, rate, bias = arguments(128, 1, (1, 1), (16, 16), 1.0)
    mixed[..., 16:32] = 1.0
    strength, fading = torch.full_like(strength, 9.0), torch.full_like(fading, -9.0)
    inverse = _factors(_Call(mixed, fading, strength, rate, bias, None, 16, 16)).inverse[0].double()
    _, key, _ = split_heads_of_unit_length(mixed.double(), (16, 16))
    key, beta = key[:64, 0, 0], betas(strength.double())[:64, 0]
    sums = log_decays(fading.double(), rate.double(), bias.double())[:64, 0, 0].cumsum(0)
    system = beta * (key @ key.T) * (sums[:, None] - sums[None, :]).exp()
    expected = torch.linalg.inv(system.tril(-1) + torch.eye(64, dtype=torch.float64))
    assert expected.tril(-1).abs().max() > 0.5  # and not 10^18, as powers of the triangle are
    torch.testing.assert_close(inverse[0], expected, rtol=1e-4, atol=1e-5)
