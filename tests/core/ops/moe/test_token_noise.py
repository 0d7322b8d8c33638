"""Noise of tokens is a function of their place in the run, on whichever rank they are."""

import dataclasses

import torch

from megatron.core.ops.dropout.dropout import DropoutRngPosition, DropoutTokens, dropout_tokens
from megatron.core.ops.moe.token_noise import token_normal, token_uniform
from megatron.core.tokens import RngPosition, SequencePart, Tokens


def place(layer: int = 1, site: str = "noise", **changes: object) -> DropoutRngPosition:
    tokens = DropoutTokens(5, torch.tensor(3), torch.arange(500) * 7)
    return DropoutRngPosition(dataclasses.replace(tokens, **changes), layer, site)


def test_values_have_their_distributions() -> None:
    uniform, normal = token_uniform(place(), 64), token_normal(place(), 64)
    assert uniform.min() > 0 and uniform.max() < 1 and uniform.unique().numel() > 31_990
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() - 1 / 12) < 0.003
    assert abs(normal.mean()) < 0.02 and abs(normal.var() - 1) < 0.03 and abs(normal.pow(4).mean() - 3) < 0.2


def test_they_change_with_everything_they_are_a_function_of() -> None:
    all_values = [
        token_normal(p, 8)
        for p in (
            place(),
            place(layer=2),
            place(site="other"),
            place(seed=6),
            place(iteration=torch.tensor(4)),
            place(index=torch.arange(500) * 7 + (1 << 33)),
        )
    ]
    for i, first in enumerate(all_values):
        assert all((first != other).float().mean() > 0.99 for other in all_values[i + 1 :])


def test_a_context_parallel_rank_has_those_of_its_tokens() -> None:
    run = RngPosition(1, 2, 3)
    whole = token_uniform(DropoutRngPosition(dropout_tokens(Tokens(8, 2, random=run), torch.device("cpu")), 1, "x"), 4)
    parts = []
    for rank in range(2):
        tokens = Tokens(4, 2, part=SequencePart(rank, 2), random=run)
        parts.append(token_uniform(DropoutRngPosition(dropout_tokens(tokens, torch.device("cpu")), 1, "x"), 4))
    rows = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])  # sequence positions by rank
    expected = whole.view(8, 2, 4)[rows].reshape(16, 4)
    assert torch.equal(torch.cat(parts), expected)
