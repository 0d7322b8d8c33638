"""Draws against their distribution, which `test_logit_filters` compares with that of transformers."""

import pytest
import torch

from megatron.core.counter_rng import stream_key, uniform
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


def test_texts_with_other_parameters_change_nothing() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0))
    kinds = (GREEDY, SamplingParams(0.7, seed=1), SamplingParams(1.3, top_p=0.8), SamplingParams(0.7, seed=2))
    texts = [TextSoFar(kinds[row % 4], [3], [1] * row, (), row) for row in range(6)]
    alone = [next_tokens(logits[row : row + 1], [text]) for row, text in enumerate(texts)]
    assert torch.equal(next_tokens(logits, texts), torch.cat(alone))


def test_draws_are_functions_of_seed_sequence_and_length() -> None:
    """They do not depend on earlier draws, nor on whether the text has become shorter."""
    text, flat = TextSoFar(SamplingParams(seed=9), sequence=4), torch.zeros(1, 1 << 16)
    key = stream_key(9, "sampling/4")
    for length in (0, 1, 63, 64, 65, 200, 7):
        text.written = [0] * length
        drawn = int(uniform(torch.tensor([length]), key) * (1 << 16))
        assert abs(int(next_tokens(flat, [text])) - drawn) <= 1, "the sum of float32 probabilities rounds"


@pytest.mark.parametrize(
    "values, words",
    [({"temperature": 0.0}, "temperature 0.0"), ({"top_k": -1}, "top_k -1"), ({"top_p": 1.5}, "top_p 1.5")],
)
def test_impossible_values(values: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        SamplingParams(**values)
