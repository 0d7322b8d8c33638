"""A T5 writes what transformers' own T5 writes."""

import pytest
import torch
from support.t5_against_transformers import InFloat64, ours, theirs

from megatron.core.exceptions import UserError
from megatron.core.inference.encoder_decoder_generation import generate_from_encoder
from megatron.core.inference.sampling import GREEDY, SamplingParams

PROMPTS = [[5, 9, 33, 2], [7], [60, 41, 12, 12, 3, 8, 20]]


@torch.no_grad()
def test_greedy_and_sampled_tokens() -> None:
    oracle = theirs(feed_forward_proj="gated-gelu", tie_word_embeddings=False)  # a tied one repeats its first token
    model = ours(oracle, False)
    expected = []
    with InFloat64():
        for prompt in PROMPTS:
            ids = [0]
            for _ in range(7):
                logits = oracle(torch.tensor([prompt]), decoder_input_ids=torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
            expected.append(ids[1:])
    found = generate_from_encoder(model, PROMPTS, 0, 7, GREEDY)
    assert found == expected and len({tuple(row) for row in found}) > 1
    end = expected[0][3]
    stopped = generate_from_encoder(model, PROMPTS, 0, 7, GREEDY, end=end)
    assert stopped == [row[: row.index(end)] if end in row else row for row in expected]
    sampling = SamplingParams(temperature=2.0, seed=4)
    together = generate_from_encoder(model, PROMPTS, 0, 7, sampling)
    alone = [generate_from_encoder(model, [p], 0, 7, sampling, first_sequence=i)[0] for i, p in enumerate(PROMPTS)]
    assert together == alone and together != expected
    with pytest.raises(UserError, match="a prompt has no tokens"):
        generate_from_encoder(model, [[3], []], 0, 7, GREEDY)
