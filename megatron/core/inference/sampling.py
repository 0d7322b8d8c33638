"""The choice of the next token: the likeliest, or a sample of the distribution."""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core.counter_rng import stream_key, uniform
from megatron.core.exceptions import UserError
from megatron.core.inference import logit_filters as filters
from megatron.core.inference.device_copies import to_device
from megatron.core.ops.precision import widened


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of the choice, named as the options of `generate` in transformers. Raises UserError for impossible
    values.

    Penalties, bans, `min_new_tokens` and `logit_bias` apply first, in the order of their fields. Then logits are
    divided by the temperature, and the cuts follow, from `top_k` to `eta_cutoff`.
    """

    temperature: float = 1.0
    """Divisor of the logits."""
    top_k: int = 0
    """Sample among the k likeliest tokens only; 0: all; 1: always the likeliest."""
    top_p: float = 0.0
    """Sample among the likeliest tokens that together reach this probability (Holtzman et al. 2019); 0: all."""
    seed: int = 1234
    min_p: float = 0.0
    """Leave out tokens with less than this share of the probability of the likeliest (Nguyen et al. 2024)."""
    typical_p: float = 0.0
    """Sample among the most typical tokens that together reach this probability (Meister et al. 2022); 0: all."""
    epsilon_cutoff: float = 0.0
    """Leave out tokens of a lower probability (Hewitt et al. 2022)."""
    eta_cutoff: float = 0.0
    """Leave out tokens of a lower probability than this, or than its root times exp(-entropy) (Hewitt et al. 2022)."""
    repetition_penalty: float = 1.0
    """Divisor of the positive logits of tokens in the prompt and the text, and factor of negative ones."""
    no_repeat_ngram_size: int = 0
    """No n-gram of this size occurs twice in the prompt and the text; 0: no limit."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that are never completed."""
    min_new_tokens: int = 0
    """Number of tokens before the text may end."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token of the text so far."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that the text has it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these tokens."""

    def __post_init__(self) -> None:
        problem = next(self._problems(), None)
        if problem is not None:
            raise UserError(problem)

    def _problems(self) -> Iterator[str]:
        if not 0 < self.temperature < float("inf"):
            yield f"temperature {self.temperature} must be larger than 0; top_k 1 always takes the likeliest"
        if not 0 < self.repetition_penalty < float("inf"):
            yield f"repetition_penalty {self.repetition_penalty} must be larger than 0; 1 has no effect"
        for name in ("top_k", "no_repeat_ngram_size", "min_new_tokens"):
            if getattr(self, name) < 0:
                yield f"{name} {getattr(self, name)} must be at least 0"
        for name in ("top_p", "min_p", "typical_p"):
            if not 0 <= getattr(self, name) <= 1:
                yield f"{name} {getattr(self, name)} must be between 0 and 1"
        for name in ("epsilon_cutoff", "eta_cutoff"):
            if not 0 <= getattr(self, name) < 1:
                yield f"{name} {getattr(self, name)} must be at least 0 and less than 1"
        if not all(self.bad_words):
            yield "bad_words: a sequence has no tokens; leave it out"

    @functools.cached_property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the text so far, or prefers some tokens."""
        penalties = self.no_repeat_ngram_size, self.bad_words, self.min_new_tokens, self.logit_bias
        return any(penalties) or self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)

    @functools.cached_property
    def without_seed(self) -> "SamplingParams":
        """These parameters with one seed for all."""
        return dataclasses.replace(self, seed=0)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.top_k == 1


GREEDY = SamplingParams(top_k=1)
"""The likeliest token is always chosen."""


_DRAWS_AT_ONCE = 64


@dataclass
class TextSoFar:
    """A text that is being written, as far as the choice of its next token depends on it."""

    sampling: SamplingParams
    prompt: Sequence[int] = ()
    written: list[int] = field(default_factory=list)
    """Ids after the prompt."""
    ends: Collection[int] = ()
    """Ids that end the text."""
    sequence: int = 0
    """Index of the text among those that are written with one seed."""
    draws: Sequence[float] = field(default=(), init=False, repr=False)
    """Uniform draws for some tokens, from the one with index `first_draw` among the written ones."""
    first_draw: int = field(default=0, init=False, repr=False)


def next_tokens(logits: Tensor, texts: Sequence[TextSoFar]) -> Tensor:
    """Returns the next token of each text, int64 [b], for logits [b, V]. A sample is a function of (seed, index of the
    sequence, number of ids written), and does not depend on the other rows."""
    groups = _rows_by_sampling(texts)
    if len(groups) == 1:
        return _choose(logits, next(iter(groups)), texts)
    order = [row for rows in groups.values() for row in rows]
    places = sorted(range(len(order)), key=order.__getitem__)
    to_group, from_group = to_device(torch.tensor([order, places]), logits.device)
    parts = logits.index_select(0, to_group).split([len(rows) for rows in groups.values()])
    chosen = [
        _choose(part, sampling, [texts[row] for row in rows])
        for part, (sampling, rows) in zip(parts, groups.items(), strict=True)
    ]
    return torch.cat(chosen).index_select(0, from_group)


def _rows_by_sampling(texts: Sequence[TextSoFar]) -> dict[SamplingParams, list[int]]:
    """Returns the numbers of the rows that have the same parameters except the seed."""
    found: dict[SamplingParams, list[int]] = {}
    for row, text in enumerate(texts):
        found.setdefault(text.sampling.without_seed, []).append(row)
    return found


def _choose(logits: Tensor, sampling: SamplingParams, texts: Sequence[TextSoFar]) -> Tensor:
    """Returns the next tokens of texts with equal parameters except the seed."""
    changed = with_penalties(logits, texts)
    if sampling.is_greedy:
        return changed.argmax(-1)
    reached = kept_probabilities(changed, sampling).cumsum(-1)
    draws = torch.tensor(_draws(texts), dtype=torch.float64).to(reached.dtype)
    limits = to_device(draws, reached.device) * reached[:, -1]
    return torch.searchsorted(reached, limits[:, None], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def _draws(texts: Sequence[TextSoFar]) -> list[float]:
    """Returns the uniform draw for the next token of each text. Draws are computed for many tokens at once, because it
    takes a hundred operations."""
    lacking = [text for text in texts if not 0 <= len(text.written) - text.first_draw < len(text.draws)]
    if lacking:
        keys = torch.tensor([stream_key(text.sampling.seed, f"sampling/{text.sequence}") for text in lacking])
        index = torch.tensor([len(text.written) for text in lacking])[:, None] + torch.arange(_DRAWS_AT_ONCE)
        for text, draws in zip(lacking, uniform(index, (keys[:, :1], keys[:, 1:])).tolist(), strict=True):
            text.first_draw, text.draws = len(text.written), draws
    return [text.draws[len(text.written) - text.first_draw] for text in texts]


def with_penalties(logits: Tensor, texts: Sequence[TextSoFar]) -> Tensor:
    """Returns logits [b, V], in float32 at least, after the penalties and bans of each row, which has one text."""
    result = widened(logits)
    if not any(text.sampling.has_penalties for text in texts):
        return result
    result = result.clone() if result is logits else result
    for row, text in zip(result, texts, strict=True):
        sampling = text.sampling
        if not sampling.has_penalties:
            continue
        ids = [*text.prompt, *text.written]
        if sampling.repetition_penalty != 1.0:
            filters.penalize_repetition(row, ids, sampling.repetition_penalty)
        if sampling.no_repeat_ngram_size:
            filters.ban(row, filters.repeated_ngram_ends(ids, sampling.no_repeat_ngram_size))
        filters.ban(row, filters.bad_word_ends(ids, sampling.bad_words))
        if len(text.written) < sampling.min_new_tokens:
            filters.ban(row, text.ends)
        if sampling.presence_penalty or sampling.frequency_penalty:
            filters.penalize_written(row, text.written, sampling.presence_penalty, sampling.frequency_penalty)
        if sampling.logit_bias:
            filters.add_bias(row, sampling.logit_bias)
    return result


def kept_probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Returns the distribution to sample from: [b, V], zero for excluded tokens, in float32 at least. Penalties are not
    part of it."""
    logits = widened(logits) / sampling.temperature
    if sampling.top_k or 0 < sampling.top_p < 1:
        logits = filters.cut_ranks(logits, sampling.top_k, sampling.top_p)
    if sampling.min_p:
        logits = filters.cut_min_p(logits, sampling.min_p)
    if 0 < sampling.typical_p < 1:
        logits = filters.cut_atypical(logits, sampling.typical_p)
    if sampling.epsilon_cutoff:
        logits = filters.cut_epsilon(logits, sampling.epsilon_cutoff)
    if sampling.eta_cutoff:
        logits = filters.cut_eta(logits, sampling.eta_cutoff)
    return logits.softmax(-1)
