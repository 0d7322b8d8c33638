"""The distribution that tokens are drawn from, against a plain loop, and the draws against it."""

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.inference.sampling import GREEDY, SamplingParams, kept_probabilities, next_tokens


def plain(logits: list[float], sampling: SamplingParams) -> list[float]:
    weights = [2.718281828459045 ** (value / sampling.temperature) for value in logits]
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total = sum(weights[i] for i in ranked)
    if sampling.top_p:
        kept, mass = [], 0.0
        for i in ranked:
            if mass >= sampling.top_p:
                break
            kept.append(i)
            mass += weights[i] / total
        ranked, total = kept, sum(weights[i] for i in kept)
    return [weights[i] / total if i in ranked else 0.0 for i in range(len(logits))]


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(top_k=3),
    SamplingParams(top_k=100),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=1e-6),
    SamplingParams(temperature=2.0, top_k=5, top_p=0.9),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_distribution(sampling: SamplingParams) -> None:
    logits = torch.randn(4, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    expected = torch.tensor([plain(row.tolist(), sampling) for row in logits], dtype=torch.float64)
    assert torch.allclose(kept_probabilities(logits, sampling), expected, rtol=1e-12)


def test_draws_follow_the_distribution() -> None:
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).expand(4000, -1)
    sampling = SamplingParams(top_k=4)
    drawn = next_tokens(logits, sampling, list(range(4000)), 0)
    frequency = torch.bincount(drawn, minlength=6) / 4000
    assert torch.allclose(frequency, kept_probabilities(logits[:1], sampling)[0], atol=0.03)
    assert frequency.count_nonzero() == 4


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    assert torch.equal(next_tokens(logits, GREEDY, [0] * 5, 3), logits.argmax(-1))


@pytest.mark.parametrize(
    "values, words",
    [({"temperature": 0.0}, "temperature 0.0"), ({"top_k": -1}, "top_k -1"), ({"top_p": 1.5}, "top_p 1.5")],
)
def test_impossible_values(values: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        SamplingParams(**values)
