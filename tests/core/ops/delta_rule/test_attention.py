"""The gated delta rule as a layer uses it, against its formula."""

import torch

from megatron.core.ops.delta_rule.attention import delta_rule_attention
from megatron.core.ops.delta_rule.recurrent import gated_delta_rule_recurrent


def test_it_is_the_rule_of_heads_of_unit_length_with_the_decays_and_strengths_of_the_layer() -> None:
    torch.manual_seed(0)
    mixed = torch.randn(9, 2, 2, 2 * 4 + 3 * 5, dtype=torch.float64)
    fading, strength = torch.randn(2, 9, 2, 2, 3, dtype=torch.float64)
    log_rate, bias = torch.randn(2, 6, dtype=torch.float64)
    document = torch.arange(9) // 4
    query, key, value = mixed[..., :4], mixed[..., 4:8], mixed[..., 8:].reshape(9, 2, 6, 5)
    found = delta_rule_attention(mixed, fading, strength, log_rate, bias, (4, 5), document)
    wanted, _ = gated_delta_rule_recurrent(
        query / query.norm(dim=-1, keepdim=True) / 2.0,
        key / key.norm(dim=-1, keepdim=True),
        value,
        -log_rate.exp() * (1 + (fading.flatten(2) + bias).exp()).log(),
        1 / (1 + (-strength.flatten(2)).exp()),
        document,
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)  # 1e-6 is added to squared lengths
