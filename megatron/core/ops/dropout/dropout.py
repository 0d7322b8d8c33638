"""Dropout whose masks are the same for every layout and every split of the batch.

The mask of a hidden vector is a function of (seed, iteration, layer, site, global token index, channel). The mask of an
attention probability is a function of (seed, iteration, layer, query's global token index, key's global token index,
head). One Philox block gives the 32-bit words of four neighbours along the last index; an element is kept if and only
if its word is at least probability * 2^32.

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

    @property
    def threshold(self) -> int:
        """An element whose word is below this is dropped."""
        return round(self.probability * 2**32)

    @property
    def scale(self) -> float:
        """Factor of the kept elements."""
        return 1.0 / (1.0 - self.probability)


def keep_rows(draw: Draw, row: Tensor, extra: Tensor, first: Tensor, count: int) -> Tensor:
    """Returns the mask, bool [rows, count]: true where an element is kept. This is the definition of a mask.

    Element j of a row is word i % 4 of the Philox block (row, i // 4, iteration, extra), with i = first + j. `row`,
    `extra` and `first` are int64 [rows].
    """
    block = (first >> 2)[:, None] + torch.arange(count // 4 + 2, device=row.device)  # all blocks that a row may need
    words = philox((row[:, None], block, draw.iteration, extra[:, None]), draw.key)
    kept = (torch.stack(words, -1) >= draw.threshold).flatten(1)  # [rows, 4 * blocks]
    lane = (first & 3)[:, None] + torch.arange(count, device=row.device)
    return kept.gather(1, lane)


@dataclass(frozen=True)
class DropoutTokens:
    """What the masks of a micro-batch depend on besides layer and site. Made once per forward pass."""

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

    def draw(self, probability: float) -> Draw:
        """Returns the arguments that all elements of the mask share."""
        return Draw(_site_key(self.tokens.seed, self.layer, self.site), self.tokens.iteration, probability)


@functools.lru_cache(maxsize=4096)
def _site_key(seed: int, layer: int, site: str) -> tuple[int, int]:
    return stream_key(seed, f"dropout/{layer}/{site}")


def dropout_tokens(tokens: Tokens, device: torch.device, keep: Keep = keep_rows) -> DropoutTokens:
    """Returns what the masks of these tokens depend on in all layers.

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
    kept = rng_position.tokens.keep(rng_position.draw(probability), row, head, first, keys.shape[1])
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
        ctx: Any,
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
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Any, ...]:
        (mask,) = ctx.saved_tensors
        inputs_gradient = (widened(output_gradient) * mask * ctx.scale).to(ctx.input_type)
        bias_gradient = inputs_gradient.sum(0) if ctx.needs_input_grad[1] else None
        residual_gradient = output_gradient if ctx.needs_input_grad[2] else None
        return inputs_gradient, bias_gradient, residual_gradient, None, None
