"""Dropout whose masks are the same for every layout and every split of the batch.

The mask of a hidden vector is a function of (seed, iteration, layer, site, global token index, channel). The mask of an
attention probability is a function of (seed, iteration, layer, query's global token index, key's global token index,
head). An element has a random number of n bits and is kept if and only if the number is at least probability * 2^n.

A channel's number is a word of a Philox block (n = 32). The numbers of 32 neighbouring keys are the columns of 16 words
of four blocks (n = 16): bit i of each number stands in word i, so that one logic operation per word compares 32 of
them. Attention masks have so many elements that comparing them one by one would take longer than drawing them.

This file is the reference, in torch operations for any device. `dropout_cpu` and `dropout_triton` give the same bits.
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
from megatron.core.utils.autograd_context import AutogradContext

Keep = Callable[["Draw", Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Draw:
    """The arguments that all elements of one mask share."""

    key: tuple[int, int]
    """The Philox key of seed, layer and site."""
    iteration: Tensor
    """int64 scalar on the device of the mask."""
    probability: float
    """Probability of dropping an element."""
    bits: int = 32
    """Bits of an element's random number: 32, or 16 for attention."""

    @property
    def threshold(self) -> int:
        """An element whose random number is below this is dropped. It fits into `bits` even for a probability near
        1."""
        return min(round(self.probability * 2**self.bits), 2**self.bits - 1)

    @property
    def scale(self) -> float:
        """Factor of the kept elements."""
        return 1.0 / (1.0 - self.probability)


def keep_rows(draw: Draw, row: Tensor, extra: Tensor, first: Tensor, count: int) -> Tensor:
    """Returns the mask, bool [rows, count]: true where an element is kept. This is the definition of a mask.

    Let i = first + j for element j of a row. Its number of 32 bits is word i % 4 of the Philox block (row, i // 4,
    iteration, extra). Its number of 16 bits has in bit 4 n + w the bit i % 32 of word w of the block (row, 4 (i // 32)
    + n, iteration, extra). `row`, `extra` and `first` are int64 [rows].
    """
    each, blocks = (4, 1) if draw.bits == 32 else (32, 4)  # elements that share some blocks, and their number
    group = (first // each)[:, None] + torch.arange(count // each + 2, device=row.device)  # all that a row may need
    words = [
        word
        for number in range(blocks)
        for word in philox((row[:, None], group * blocks + number, draw.iteration, extra[:, None]), draw.key)
    ]
    if draw.bits == 32:
        kept = torch.stack(words, -1) >= draw.threshold  # [rows, groups, 4]
    else:
        kept = (_at_least(words, draw.threshold)[..., None] >> torch.arange(32, device=row.device) & 1).bool()
    lane = (first % each)[:, None] + torch.arange(count, device=row.device)
    return kept.flatten(1).gather(1, lane)


def _at_least(words: list[Tensor], threshold: int) -> Tensor:
    """Returns words whose bits tell which of 32 numbers are at least `threshold`. Word i has bit i of each number."""
    found = torch.full_like(words[0], 0xFFFFFFFF)
    for number, word in enumerate(words):  # the highest bit that differs from the threshold's decides
        found = found & word if threshold >> number & 1 else found | word
    return found


@dataclass(frozen=True)
class DropoutTokens:
    """The values that the masks of a micro-batch depend on, besides layer and site. Made once per forward pass."""

    seed: int
    iteration: Tensor
    """int64 scalar."""
    index: Tensor
    """Global index of each token, int64 [t]: (index of its sample in the global batch) * sample length + position."""
    keep: Keep = keep_rows
    """`keep_rows`, or a faster implementation of it."""


@dataclass(frozen=True)
class DropoutRngPosition:
    """One application of dropout: its tokens, its layer (from 1; 0 outside layers) and its site in the layer."""

    tokens: DropoutTokens
    layer: int
    site: str

    def draw(self, probability: float, bits: int = 32) -> Draw:
        """Returns the arguments that all elements of the mask share."""
        return Draw(_site_key(self.tokens.seed, self.layer, self.site), self.tokens.iteration, probability, bits)

    def draw_attention(self, probability: float) -> Draw:
        """Returns the arguments that all elements of a mask of attention probabilities share."""
        return self.draw(probability, bits=16)


@functools.lru_cache(maxsize=4096)
def _site_key(seed: int, layer: int, site: str) -> tuple[int, int]:
    return stream_key(seed, f"dropout/{layer}/{site}")


def dropout_tokens(tokens: Tokens, device: torch.device, keep: Keep = keep_rows) -> DropoutTokens:
    """Returns the values that the masks of these tokens depend on in all layers.

    If `tokens.random` is None, the seed is drawn from torch's default generator, once per call.
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


def keep_hidden(rng_position: DropoutRngPosition, width: int, probability: float) -> Tensor:
    """Returns which channels of each token are kept: bool [t, width]."""
    token = rng_position.tokens.index
    return rng_position.tokens.keep(rng_position.draw(probability), token, token >> 32, torch.zeros_like(token), width)


def keep_attention(
    rng_position: DropoutRngPosition, queries: Tensor, keys: Tensor, heads: Tensor, probability: float
) -> Tensor:
    """Returns which attention probabilities are kept: bool [b, heads, sq, sk].

    `queries` [b, sq] and `keys` [b, sk] are global token indices; the keys of a row are consecutive. `heads` [heads]
    are indices over the whole model.
    """
    shape = (queries.shape[0], heads.shape[0], queries.shape[1])
    row = queries[:, None, :].expand(shape).reshape(-1)
    head = heads[None, :, None].expand(shape).reshape(-1)
    first = keys[:, :1, None].expand(shape).reshape(-1)
    kept = rng_position.tokens.keep(rng_position.draw_attention(probability), row, head, first, keys.shape[1])
    return kept.view(*shape, -1)


# ---------------------------------------------------------------------------------------------------------------------
# Bias, dropout and residual in one operation


def bias_dropout_add(
    inputs: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    probability: float,
    rng_position: DropoutRngPosition | None,
) -> Tensor:
    """Returns residual + dropout(inputs + bias), all [t, h] (bias [h]).

    Without `rng_position` nothing is dropped. With it, the sum is computed in float32 at least and rounded once.
    """
    if rng_position is None or probability == 0.0:
        if bias is not None:
            inputs = inputs + bias
        return inputs if residual is None else residual + inputs
    return _BiasDropoutAdd.apply(inputs, bias, residual, probability, rng_position)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        inputs: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        probability: float,
        rng_position: DropoutRngPosition,
    ) -> Tensor:
        mask = keep_hidden(rng_position, inputs.shape[-1], probability)
        ctx.save_for_backward(mask)
        ctx.scale, ctx.input_type = 1.0 / (1.0 - probability), inputs.dtype
        output_type = inputs.dtype if residual is None else torch.promote_types(inputs.dtype, residual.dtype)
        output = widened(inputs) if bias is None else widened(inputs) + bias
        output = output * mask * ctx.scale
        return (output if residual is None else residual + output).to(output_type)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Any, ...]:
        (mask,) = ctx.saved_tensors
        inputs_gradient = (widened(output_gradient) * mask * ctx.scale).to(ctx.input_type)
        bias_gradient = inputs_gradient.sum(0) if ctx.needs_input_grad[1] else None
        residual_gradient = output_gradient if ctx.needs_input_grad[2] else None
        return inputs_gradient, bias_gradient, residual_gradient, None, None
