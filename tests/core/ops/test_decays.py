"""Sums of logarithms of decays keep their digits."""

import torch

from megatron.core.ops.decays import sums_between


def test_sums_are_those_of_the_tokens_between_and_keep_their_digits() -> None:
    # A decay of 16 * softplus(3) for most tokens; small ones between two tokens must not vanish beside their sum.
    generator = torch.Generator().manual_seed(0)
    decays = -50.0 * torch.rand(3, 64, generator=generator)
    decays[:, 40:44] = -1e-3 * torch.rand(3, 4, generator=generator)
    found = sums_between(decays)
    assert found.shape == (3, 64, 64) and found.dtype is torch.float32
    for token in range(64):
        for before in range(64):
            exact = decays[:, before + 1 : token + 1].double().sum(-1)
            assert torch.allclose(found[:, token, before].double(), exact, rtol=3e-6, atol=0.0), (token, before)
