"""Dropout whose mask is a function of where it is applied, for every layout and every way of cutting the batch.

The mask of a hidden vector is a function of (seed, iteration, layer, site, global token index, channel), that of an
attention probability of (seed, iteration, layer, query's global token index, key's global token index, head). One block
of Philox gives the four neighbours along the last index, whose word decides: an element is kept iff its 32-bit word is
at least probability * 2^32.

This file is the definition, in torch operations for any device. `dropout_cpu` and `dropout_triton` give the same bits.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.counter_rng import philox, stream_key
from megatron.core.tokens import Tokens


@dataclass(frozen=True)
class DropoutTokens:
    """What a micro-batch's masks depend on beside layer and site; made once a forward pass."""

    seed: int
    iteration: Tensor | int
    index: Tensor
    """Global index of each token, int64 [t]: (place of its sample in the global batch) * sample length + position."""


@dataclass(frozen=True)
class DropoutPlace:
    """One application of dropout: which tokens, which layer (from 1; 0 outside of layers), which site in it."""

    tokens: DropoutTokens
    layer: int
    site: str

    @property
    def key(self) -> tuple[int, int]:
        """The Philox key of seed, layer and site."""
        return _place_key(self.tokens.seed, self.layer, self.site)


@functools.lru_cache(maxsize=4096)
def _place_key(seed: int, layer: int, site: str) -> tuple[int, int]:
    return stream_key(seed, f"dropout/{layer}/{site}")


def dropout_tokens(tokens: Tokens, device: torch.device) -> DropoutTokens:
    """The part of a place in the run that is common to all layers.

    Without a place in a run (`tokens.random` None) the seed comes from torch's default generator, once a call.
    """
    random = tokens.random
    first_sample = random.first_sample if random is not None else 0
    sample_length = tokens.sample_length or tokens.seq_length
    position = torch.arange(tokens.seq_length, device=device)[:, None] + tokens.first_position  # [s, 1]
    row = torch.arange(tokens.batch_size, device=device)  # [b]
    index = (position + row * tokens.seq_length).view(-1) + first_sample * sample_length  # [t]
    if random is None:
        return DropoutTokens(int(torch.randint(2**62, ())), 0, index)
    return DropoutTokens(random.seed, random.iteration, index)


def threshold(probability: float) -> int:
    """Words below it drop their element."""
    return round(probability * 2**32)


# ---------------------------------------------------------------------------------------------------------------------
# Masks


def keep_hidden(place: DropoutPlace, width: int, probability: float) -> Tensor:
    """True where a channel of a token is kept: bool [t, width]."""
    token = place.tokens.index[:, None]  # [t, 1]
    block = torch.arange((width + 3) // 4, device=token.device)
    words = philox((token, block, place.tokens.iteration, token >> 32), place.key)
    return (torch.stack(words, -1) >= threshold(probability)).view(token.shape[0], -1)[:, :width]


def keep_attention(place: DropoutPlace, queries: Tensor, keys: Tensor, heads: Tensor, probability: float) -> Tensor:
    """True where a probability is kept: bool [b, heads, sq, sk].

    `queries` [b, sq] and `keys` [b, sk] are global token indices, each row of keys being consecutive; `heads` [heads]
    counts heads over the whole model.
    """
    first = keys[:, :1] >> 2  # [b, 1]
    block = first + torch.arange(keys.shape[1] // 4 + 2, device=keys.device)  # every block that the row may touch
    words = philox(
        (queries[:, None, :, None], block[:, None, None, :], place.tokens.iteration, heads[:, None, None]), place.key
    )
    kept = (torch.stack(words, -1) >= threshold(probability)).flatten(-2)  # [b, heads, sq, 4 * blocks]
    lane = (keys - 4 * first)[:, None, None, :].expand(*kept.shape[:-1], -1)
    return kept.gather(-1, lane)


# ---------------------------------------------------------------------------------------------------------------------
# Bias, dropout and residual in one


def bias_dropout_add(
    inputs: Tensor, bias: Tensor | None, residual: Tensor | None, probability: float, place: DropoutPlace | None
) -> Tensor:
    """residual + dropout(inputs + bias), all [t, h] (bias [h]). No `place`: nothing is dropped."""
    if place is None or probability == 0.0:
        if bias is not None:
            inputs = inputs + bias
        return inputs if residual is None else residual + inputs
    return _BiasDropoutAdd.apply(inputs, bias, residual, probability, place, keep_hidden)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        probability: float,
        place: DropoutPlace,
        keep: Any,
    ) -> Tensor:
        mask = keep(place, inputs.shape[-1], probability).view(inputs.shape)
        ctx.save_for_backward(mask)
        ctx.scale, ctx.input_type = 1.0 / (1.0 - probability), inputs.dtype
        output = (inputs if bias is None else inputs + bias) * mask * ctx.scale
        return output if residual is None else residual + output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Any, ...]:
        (mask,) = ctx.saved_tensors
        inputs_gradient = (output_gradient * mask * ctx.scale).to(ctx.input_type)
        bias_gradient = inputs_gradient.reshape(-1, mask.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        residual_gradient = output_gradient if ctx.needs_input_grad[2] else None
        return inputs_gradient, bias_gradient, residual_gradient, None, None, None
