"""A convolution in pieces, with rows of different lengths, reads what it would read at once."""

import torch

from megatron.core.inference.static_context import StaticInferenceContext
from megatron.core.ops.causal_conv import causal_conv
from megatron.core.transformer.recurrent_cache import convolve_with_cache, is_padding


def test_a_convolution_goes_on_behind_each_rows_own_tokens() -> None:
    torch.manual_seed(0)
    weight, rows, lengths = torch.randn(4, 3), torch.randn(8, 2, 4), [2, 5]
    expected = causal_conv(rows, weight)
    context = StaticInferenceContext(2, 8)
    context.begin(torch.tensor(lengths), filled_to=5)
    prompts = rows[:5].clone()
    prompts[2:, 0] = 100.0  # padding
    assert is_padding(context, 5)[..., 0].t().tolist() == [[False, False, True, True, True], [False] * 5]
    found = convolve_with_cache(context, 1, prompts, 3, lambda padded: causal_conv(padded, weight))
    torch.testing.assert_close(found[:2, 0], expected[:2, 0])
    torch.testing.assert_close(found[:, 1], expected[:5, 1])
    for step in range(3):
        context.advance()
        at = torch.tensor(lengths) + step
        token = rows[at, torch.arange(2)][None]
        assert not is_padding(context, 1).any()
        found = convolve_with_cache(context, 1, token, 3, lambda padded: causal_conv(padded, weight))
        torch.testing.assert_close(found[0], expected[at, torch.arange(2)])
