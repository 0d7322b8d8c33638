"""Dropout whose mask is a function of where it is applied, for every layout and every way of cutting the batch.

The mask of a hidden vector is a function of (seed, iteration, layer, site, global token index, channel), that of an
attention probability of (seed, iteration, layer, query's global token index, key's global token index, head). One block
of Philox gives the four neighbours along the last index, whose word decides: an element is kept iff its 32-bit word is
at least probability * 2^32.

This file is the definition, in torch operations for any device. `dropout_cpu` and `dropout_triton` give the same bits.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.counter_rng import philox, stream_key
from megatron.core.ops.precision import widened
from megatron.core.tokens import Tokens, row_index

Keep = Callable[["Draw", Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Draw:
    """The part of a mask's argument that is the same for all of its elements."""

    key: tuple[int, int]
    """The Philox key of seed, layer and site."""
    iteration: Tensor
    """int64 scalar on the device of the mask."""
    probability: float
    """Of being dropped."""

    @property
    def threshold(self) -> int:
        """Words below it drop their element."""
        return round(self.probability * 2**32)

    @property
    def scale(self) -> float:
        """Factor of what is kept."""
        return 1.0 / (1.0 - self.probability)


def keep_rows(draw: Draw, row: Tensor, extra: Tensor, first: Tensor, count: int) -> Tensor:
    """True where an element is kept: bool [rows, count]. The definition of a mask.

    Element j of a row is word i % 4 of the Philox block (row, i // 4, iteration, extra), with i = first + j. `row`,
    `extra` and `first` are int64 [rows].
    """
    block = (first >> 2)[:, None] + torch.arange(count // 4 + 2, device=row.device)  # all that a row may touch
    words = philox((row[:, None], block, draw.iteration, extra[:, None]), draw.key)
    kept = (torch.stack(words, -1) >= draw.threshold).flatten(1)  # [rows, 4 * blocks]
    lane = (first & 3)[:, None] + torch.arange(count, device=row.device)
    return kept.gather(1, lane)


@dataclass(frozen=True)
class DropoutTokens:
    """What a micro-batch's masks depend on beside layer and site; made once a forward pass."""

    seed: int
    iteration: Tensor
    """int64 scalar."""
    index: Tensor
    """Global index of each token, int64 [t]: (place of its sample in the global batch) * sample length + position."""
    keep: Keep = keep_rows
    """`keep_rows`, or a faster implementation of it."""


@dataclass(frozen=True)
class DropoutRngPosition:
    """One application of dropout: which tokens, which layer (from 1; 0 outside of layers), which site in it."""

    tokens: DropoutTokens
    layer: int
    site: str

    def draw(self, probability: float) -> Draw:
        """What all elements of the mask have in common."""
        return Draw(_place_key(self.tokens.seed, self.layer, self.site), self.tokens.iteration, probability)


@functools.lru_cache(maxsize=4096)
def _place_key(seed: int, layer: int, site: str) -> tuple[int, int]:
    return stream_key(seed, f"dropout/{layer}/{site}")


def dropout_tokens(tokens: Tokens, device: torch.device, keep: Keep = keep_rows) -> DropoutTokens:
    """The part of a place in the run that is common to all layers.

    Without a place in a run (`tokens.random` None) the seed comes from torch's default generator, once a call.
    """
    random = tokens.random
    first_sample = random.first_sample if random is not None else 0
    sample_length = tokens.sample_length or tokens.row_length
    position = row_index(tokens, device)[:, None]  # [s, 1]
    row = torch.arange(tokens.batch_size, device=device)  # [b]
    index = (position + row * tokens.row_length).view(-1) + first_sample * sample_length  # [t]
    if random is None:
        return DropoutTokens(
            int(torch.randint(2**62, ())), torch.zeros((), dtype=torch.int64, device=device), index, keep
        )
    iteration = random.iteration
    if not isinstance(iteration, Tensor):
        iteration = torch.full((), iteration, dtype=torch.int64, device=device)
    return DropoutTokens(random.seed, iteration, index, keep)


# ---------------------------------------------------------------------------------------------------------------------
# Masks


def keep_hidden(place: DropoutRngPosition, width: int, probability: float) -> Tensor:
    """True where a channel of a token is kept: bool [t, width]."""
    token = place.tokens.index
    return place.tokens.keep(place.draw(probability), token, token >> 32, torch.zeros_like(token), width)


def keep_attention(
    place: DropoutRngPosition, queries: Tensor, keys: Tensor, heads: Tensor, probability: float
) -> Tensor:
    """True where a probability is kept: bool [b, heads, sq, sk].

    `queries` [b, sq] and `keys` [b, sk] are global token indices, each row of keys being consecutive; `heads` [heads]
    counts heads over the whole model.
    """
    shape = (queries.shape[0], heads.shape[0], queries.shape[1])
    row = queries[:, None, :].expand(shape).reshape(-1)
    head = heads[None, :, None].expand(shape).reshape(-1)
    first = keys[:, :1, None].expand(shape).reshape(-1)
    kept = place.tokens.keep(place.draw(probability), row, head, first, keys.shape[1])
    return kept.view(*shape, -1)


# ---------------------------------------------------------------------------------------------------------------------
# Bias, dropout and residual in one


def bias_dropout_add(
    inputs: Tensor, bias: Tensor | None, residual: Tensor | None, probability: float, place: DropoutRngPosition | None
) -> Tensor:
    """residual + dropout(inputs + bias), all [t, h] (bias [h]). No `place`: nothing is dropped; with one, the sum is
    computed in float32 at least and rounded once."""
    if place is None or probability == 0.0:
        if bias is not None:
            inputs = inputs + bias
        return inputs if residual is None else residual + inputs
    return _BiasDropoutAdd.apply(inputs, bias, residual, probability, place)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        probability: float,
        place: DropoutRngPosition,
    ) -> Tensor:
        mask = keep_hidden(place, inputs.shape[-1], probability)
        ctx.save_for_backward(mask)
        ctx.scale, ctx.input_type = 1.0 / (1.0 - probability), inputs.dtype
        output_type = inputs.dtype if residual is None else torch.promote_types(inputs.dtype, residual.dtype)
        output = widened(inputs) if bias is None else widened(inputs) + bias
        output = output * mask * ctx.scale
        return (output if residual is None else residual + output).to(output_type)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Any, ...]:
        (mask,) = ctx.saved_tensors
        inputs_gradient = (widened(output_gradient) * mask * ctx.scale).to(ctx.input_type)
        bias_gradient = inputs_gradient.sum(0) if ctx.needs_input_grad[1] else None
        residual_gradient = output_gradient if ctx.needs_input_grad[2] else None
        return inputs_gradient, bias_gradient, residual_gradient, None, None
