"""Draws against their distribution, which `test_logit_filters` compares with that of transformers."""

import pytest
import torch

from megatron.core.exceptions import UserError
from megatron.core.inference.sampling import GREEDY, SamplingParams, TextSoFar, kept_probabilities, next_tokens


def test_draws_follow_the_distribution() -> None:
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).expand(4000, -1)
    sampling = SamplingParams(top_k=4)
    drawn = next_tokens(logits, [TextSoFar(sampling, sequence=number) for number in range(4000)])
    frequency = torch.bincount(drawn, minlength=6) / 4000
    assert torch.allclose(frequency, kept_probabilities(logits[:1], sampling)[0], atol=0.03)
    assert frequency.count_nonzero() == 4


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    assert torch.equal(next_tokens(logits, [TextSoFar(GREEDY)] * 5), logits.argmax(-1))


@pytest.mark.parametrize(
    "values, words",
    [({"temperature": 0.0}, "temperature 0.0"), ({"top_k": -1}, "top_k -1"), ({"top_p": 1.5}, "top_p 1.5")],
)
def test_impossible_values(values: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        SamplingParams(**values)
