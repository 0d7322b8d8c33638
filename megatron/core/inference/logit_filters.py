"""Changes of logits before a token is chosen: penalties and bans that depend on the text, cuts of the distribution.

They have the meaning of the options of `generate` in transformers. `logits` are [b, V]; excluded tokens get -inf.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from megatron.core.inference.device_copies import to_device

# ---------------------------------------------------------------------------------------------------------------------
# What depends on the text: changes a row of logits [V] in place


def penalize_repetition(row: Tensor, ids: Sequence[int], penalty: float) -> None:
    """Divides positive logits of the tokens `ids` by the penalty, and multiplies negative ones (Keskar et al. 2019)."""
    seen = to_device(torch.tensor(sorted(set(ids)), dtype=torch.long), row.device)
    before = row[seen]
    row[seen] = torch.where(before < 0, before * penalty, before / penalty)


def penalize_written(row: Tensor, written: Sequence[int], presence: float, frequency: float) -> None:
    """Lowers the logit of each token that was written n > 0 times by presence + n * frequency, as OpenAI's interface
    does."""
    seen, times = torch.tensor(written, dtype=torch.long).unique(return_counts=True)
    row[to_device(seen, row.device)] -= to_device((presence + frequency * times).to(row.dtype), row.device)


def add_bias(row: Tensor, bias: Mapping[int, float]) -> None:
    """Adds a number to the logits of some tokens."""
    tokens = to_device(torch.tensor(list(bias), dtype=torch.long), row.device)
    row[tokens] += to_device(torch.tensor(list(bias.values())).to(row.dtype), row.device)


def ban(row: Tensor, tokens: Collection[int]) -> None:
    """Excludes tokens."""
    if tokens:
        row.index_fill_(0, to_device(torch.tensor(sorted(tokens), dtype=torch.long), row.device), -torch.inf)


def repeated_ngram_ends(ids: Sequence[int], size: int) -> set[int]:
    """Returns the tokens that would complete an n-gram of this size that the text has already."""
    last = tuple(ids[len(ids) - size + 1 :]) if size > 1 else ()
    if len(ids) + 1 < size:
        return set()
    return {ids[end] for end in range(size - 1, len(ids)) if tuple(ids[end - size + 1 : end]) == last}


def bad_word_ends(ids: Sequence[int], words: Sequence[Sequence[int]]) -> set[int]:
    """Returns the tokens that would complete one of the sequences `words`."""
    return {word[-1] for word in words if len(ids) >= len(word) - 1 and _ends_with(ids, word[:-1])}


def _ends_with(ids: Sequence[int], tail: Sequence[int]) -> bool:
    return tuple(ids[len(ids) - len(tail) :]) == tuple(tail)


# ---------------------------------------------------------------------------------------------------------------------
# Cuts of the distribution: [b, V] to [b, V]


def cut_ranks(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Keeps the `top_k` likeliest tokens, and of these the likeliest that together reach the probability `top_p`
    (Holtzman et al. 2019). 0: all."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ranked[:, top_k:] = -torch.inf
    if top_p:
        probabilities = ranked.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        ranked = ranked.masked_fill(before >= top_p, -torch.inf)
    return torch.empty_like(ranked).scatter(-1, order, ranked)


def cut_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Keeps tokens with at least `min_p` times the probability of the likeliest (Nguyen et al. 2024)."""
    probabilities = logits.softmax(-1)
    return _keep_likeliest(logits, probabilities < min_p * probabilities.amax(-1, keepdim=True))


def cut_atypical(logits: Tensor, mass: float) -> Tensor:
    """Keeps the tokens whose information is nearest to the entropy and that together reach the probability `mass`
    (Meister et al. 2022, locally typical sampling)."""
    logs = logits.log_softmax(-1)
    distance = (-logs - entropy(logs)).abs()
    ranked, order = distance.sort(dim=-1, stable=True)
    reached = logs.exp().gather(-1, order).cumsum(-1)
    last = (reached < mass).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return logits.masked_fill(distance > ranked.gather(-1, last), -torch.inf)


def cut_epsilon(logits: Tensor, epsilon: float) -> Tensor:
    """Keeps tokens of at least this probability (Hewitt et al. 2022, epsilon sampling)."""
    return _keep_likeliest(logits, logits.softmax(-1) < epsilon)


def cut_eta(logits: Tensor, epsilon: float) -> Tensor:
    """Keeps tokens of at least the probability min(epsilon, sqrt(epsilon) exp(-entropy)) (Hewitt et al. 2022, eta
    sampling)."""
    logs = logits.log_softmax(-1)
    least = (epsilon**0.5 * (-entropy(logs)).exp()).clamp(max=epsilon)
    return _keep_likeliest(logits, logs.exp() < least)


def entropy(logs: Tensor) -> Tensor:
    """Returns the entropy [b, 1] of distributions whose logarithms are `logs` [b, V]."""
    return -(logs.exp() * logs).nansum(-1, keepdim=True)  # 0 times -inf is nan, which stands for 0


def _keep_likeliest(logits: Tensor, removed: Tensor) -> Tensor:
    """Excludes tokens, but never the likeliest."""
    return logits.masked_fill(removed & (logits < logits.amax(-1, keepdim=True)), -torch.inf)
