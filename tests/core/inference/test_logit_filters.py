"""Penalties, bans and cuts against the processors of transformers, in float64."""

import pytest
import torch

from megatron.core.inference.logit_filters import bad_word_ends, repeated_ngram_ends
from megatron.core.inference.sampling import SamplingParams, TextSoFar, kept_probabilities, with_penalties

transformers = pytest.importorskip("transformers")
from transformers.generation import logits_process as theirs  # noqa: E402

VOCABULARY = 29
LOGITS = torch.randn(6, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
IDS = torch.randint(5, (6, 12), generator=torch.Generator().manual_seed(1))
BAD = [[3], [int(IDS[0, -1]), 7], [int(IDS[1, -2]), int(IDS[1, -1]), 9], [28, 27, 26]]
ENDS = (2, 11)

PENALTIES = {
    "repetition": (SamplingParams(repetition_penalty=1.7), [theirs.RepetitionPenaltyLogitsProcessor(1.7)]),
    "rewarded repetition": (SamplingParams(repetition_penalty=0.4), [theirs.RepetitionPenaltyLogitsProcessor(0.4)]),
    "n-grams": (SamplingParams(no_repeat_ngram_size=2), [theirs.NoRepeatNGramLogitsProcessor(2)]),
    "single tokens": (SamplingParams(no_repeat_ngram_size=1), [theirs.NoRepeatNGramLogitsProcessor(1)]),
    "bad words": (SamplingParams(bad_words=tuple(map(tuple, BAD))), [theirs.NoBadWordsLogitsProcessor(BAD)]),
    "a minimum": (
        SamplingParams(min_new_tokens=7),
        [theirs.MinNewTokensLengthLogitsProcessor(6, 7, list(ENDS), device="cpu")],
    ),
    "a minimum that is reached": (
        SamplingParams(min_new_tokens=6),
        [theirs.MinNewTokensLengthLogitsProcessor(6, 6, list(ENDS), device="cpu")],
    ),
    "all": (
        SamplingParams(
            repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words=tuple(map(tuple, BAD)), min_new_tokens=9
        ),
        [
            theirs.RepetitionPenaltyLogitsProcessor(1.3),
            theirs.NoRepeatNGramLogitsProcessor(2),
            theirs.NoBadWordsLogitsProcessor(BAD),
            theirs.MinNewTokensLengthLogitsProcessor(6, 9, list(ENDS), device="cpu"),
        ],
    ),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_are_those_of_transformers(name: str) -> None:
    sampling, processors = PENALTIES[name]
    texts = [TextSoFar(sampling, row[:6], row[6:], ENDS) for row in IDS.tolist()]
    expected = theirs.LogitsProcessorList(processors)(IDS, LOGITS.clone())
    assert torch.equal(with_penalties(LOGITS, texts), expected)
    if "reached" not in name:
        assert not torch.equal(expected, LOGITS)


CUTS = {
    "top-k": (SamplingParams(top_k=4), [theirs.TopKLogitsWarper(4)]),
    "top-p": (SamplingParams(top_p=0.7), [theirs.TopPLogitsWarper(0.7)]),
    "top-p of one token": (SamplingParams(top_p=1e-6), [theirs.TopPLogitsWarper(1e-6)]),
    "min-p": (SamplingParams(min_p=0.15), [theirs.MinPLogitsWarper(0.15)]),
    "typical": (SamplingParams(typical_p=0.5), [theirs.TypicalLogitsWarper(0.5)]),
    "epsilon": (SamplingParams(epsilon_cutoff=0.05), [theirs.EpsilonLogitsWarper(0.05)]),
    "epsilon of all": (SamplingParams(epsilon_cutoff=0.99), [theirs.EpsilonLogitsWarper(0.99)]),
    "eta": (SamplingParams(eta_cutoff=0.1), [theirs.EtaLogitsWarper(0.1)]),
    "all": (
        SamplingParams(1.4, 20, 0.97, min_p=0.01, typical_p=0.95, epsilon_cutoff=0.01, eta_cutoff=0.02),
        [
            theirs.TemperatureLogitsWarper(1.4),
            theirs.TopKLogitsWarper(20),
            theirs.TopPLogitsWarper(0.97),
            theirs.MinPLogitsWarper(0.01),
            theirs.TypicalLogitsWarper(0.95),
            theirs.EpsilonLogitsWarper(0.01),
            theirs.EtaLogitsWarper(0.02),
        ],
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_cuts_are_those_of_transformers(name: str) -> None:
    sampling, processors = CUTS[name]
    expected = theirs.LogitsProcessorList(processors)(IDS, LOGITS.clone()).softmax(-1)
    found = kept_probabilities(LOGITS, sampling)
    assert torch.equal(found == 0, expected == 0) and 0 < int((found == 0).sum()) < found.numel() - len(found) + 1
    assert torch.allclose(found, expected, rtol=1e-12, atol=0)


def test_the_best_of_more_than_all_are_all() -> None:
    assert torch.equal(kept_probabilities(LOGITS, SamplingParams(top_k=100)), LOGITS.softmax(-1))


@pytest.mark.slow
def test_the_same_order_as_generate_of_transformers() -> None:
    """generate applies the processors in the order of this file."""
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=VOCABULARY, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": BAD, "min_new_tokens": 9}
    cuts = {"temperature": 1.4, "top_k": 20, "top_p": 0.97, "min_p": 0.01, "typical_p": 0.95}
    more = {"epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "do_sample": True, "eos_token_id": list(ENDS)}
    settings = transformers.GenerationConfig(**options, **cuts, **more)
    model._prepare_special_tokens(settings, kwargs_has_attention_mask=True, device="cpu")
    found = model._get_logits_processor(settings, 6, IDS, None, [], device="cpu")
    ours = [*PENALTIES["all"][1], *CUTS["all"][1]]
    assert [type(processor) for processor in found if type(processor) in map(type, ours)] == list(map(type, ours))


def test_presence_frequency_and_bias() -> None:
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={1: 3.0, 28: -100.0})
    texts = [TextSoFar(sampling, row[:6], row[6:]) for row in IDS.tolist()]
    expected = LOGITS.clone()
    for row, written in zip(expected, IDS[:, 6:].tolist(), strict=True):
        for token in set(written):
            row[token] -= 0.5 + 0.25 * written.count(token)
        row[1] += 3.0
        row[28] -= 100.0
    assert torch.allclose(with_penalties(LOGITS, texts), expected, rtol=1e-14)


def test_short_texts_have_nothing_to_repeat() -> None:
    assert repeated_ngram_ends([1], 3) == set() and repeated_ngram_ends([], 1) == set()
    assert repeated_ngram_ends([1, 2, 1], 2) == {2}
    assert bad_word_ends([], [(4,), (5, 6)]) == {4}
