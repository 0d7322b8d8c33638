"""Text generation with recurrent layers: the state that is kept between two calls."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.transformer.layer_inputs import InferenceContext

Advance = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]
"""Returns the outputs of a recurrence and its last state, for inputs, the state before them, and `is_padding`."""


def continue_recurrence(
    context: InferenceContext,
    layer_number: int,
    mixed: Tensor,
    taps: int,
    convolve: Callable[[Tensor], Tensor],
    advance: Advance,
) -> Tensor:
    """Returns the result of `advance` for silu(convolution) of the tokens `mixed` [s, b, ...], which continue those in
    the context. The context keeps the states."""
    convolved = F.silu(convolve_with_cache(context, layer_number, mixed.flatten(2), taps, convolve)).view(mixed.shape)
    state = context.recall(layer_number, "state")
    output, state = advance(convolved, state, is_padding(context, mixed.shape[0]))
    context.remember(layer_number, "state", state)
    return output


def convolve_with_cache(
    context: InferenceContext, layer_number: int, inputs: Tensor, taps: int, convolve: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns `convolve` of the current tokens [s, b, c], each with the taps - 1 tokens before it, which the context
    keeps for the next call. `convolve` maps [n, b, c] to the same shape and reads `taps` tokens at most."""
    before = context.recall(layer_number, "window")
    if before is None:
        before = inputs.new_zeros(inputs.shape[1], taps - 1, inputs.shape[2])
    padded = torch.cat([before.transpose(0, 1), inputs])
    last = context.token_counts() + torch.arange(taps - 1, device=inputs.device)[:, None]  # [taps - 1, b]
    window = padded.gather(0, last[..., None].expand(-1, -1, inputs.shape[2]))
    context.remember(layer_number, "window", window.transpose(0, 1))
    return convolve(padded)[taps - 1 :]


def is_padding(context: InferenceContext, length: int) -> Tensor:
    """Returns which of the current tokens are padding: bool [length, b, 1]. Padding must not change the states."""
    counts = context.token_counts()
    return (torch.arange(length, device=counts.device)[:, None] >= counts)[..., None]
