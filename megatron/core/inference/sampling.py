"""The choice of the next token: the likeliest, or a sample of the distribution."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.counter_rng import stream_key, uniform
from megatron.core.exceptions import UserError
from megatron.core.ops.precision import widened


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of the choice. Raises UserError for impossible values."""

    temperature: float = 1.0
    """Divisor of the logits."""
    top_k: int = 0
    """Sample among the k likeliest tokens only; 0: all; 1: always the likeliest."""
    top_p: float = 0.0
    """Sample among the likeliest tokens that together reach this probability (Holtzman et al. 2019); 0: all."""
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UserError(f"temperature {self.temperature} must be larger than 0; top_k 1 always takes the likeliest")
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k} must be at least 0")
        if not 0 <= self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} must be between 0 and 1")


GREEDY = SamplingParams(top_k=1)
"""True if the likeliest token is always chosen."""


def next_tokens(logits: Tensor, sampling: SamplingParams, sequences: list[int], position: int) -> Tensor:
    """Returns one token per row, int64 [b], for logits [b, V]. A sample is a function of (seed, index of the sequence,
    position in it), and does not depend on the batch."""
    if sampling.top_k == 1:
        return logits.argmax(-1)
    probabilities = kept_probabilities(logits, sampling)
    draws = torch.cat(
        [uniform(torch.tensor([position]), stream_key(sampling.seed, f"sampling/{number}")) for number in sequences]
    )
    reached = probabilities.cumsum(-1)
    draws = draws.to(reached) * reached[:, -1]
    return torch.searchsorted(reached, draws[:, None], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def kept_probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Returns the distribution to sample from: [b, V], zero for excluded tokens, in float32 at least."""
    logits = widened(logits) / sampling.temperature
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ranked[:, sampling.top_k :] = -torch.inf
    probabilities = ranked.softmax(-1)
    if sampling.top_p:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(-1, order, probabilities)
