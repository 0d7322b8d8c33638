"""The scan of a Mamba-2 layer: step sizes and decays, the recurrence of the states, and the skip connection."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.precision import widened
from megatron.core.ops.ssd.chunked import ssd


def mamba_scan(
    mixed: Tensor,
    step: Tensor,
    step_bias: Tensor,
    log_rate: Tensor,
    skip: Tensor,
    document: Tensor | None = None,
    *,
    head_dim: int,
    state_dim: int,
    min_step: float = 0.0,
    states_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns y = `ssd` of x + D x, [s, b, g, channels], for x, B and C of each group [s, b, g, channels + 2 n], dt [s,
    b, g, heads of a group], and dt_bias, A_log and D of each head. Step sizes are max(softplus(dt + dt_bias),
    min_step), rates -exp(A_log). Computed in float32 at least, which is the type of the result; kernels may round it
    to the type of x.

    `document` [s] is the number of each token's packed document, ascending. `states_dtype` is the type of the states
    that are kept between chunks; None: that of the computation.
    """
    sizes = {"head_dim": head_dim, "state_dim": state_dim, "min_step": min_step, "states_dtype": states_dtype}
    return mamba_scan_with_state(mixed, step, step_bias, log_rate, skip, document, **sizes)[0]  # type: ignore[arg-type]


def mamba_scan_with_state(
    mixed: Tensor,
    step: Tensor,
    step_bias: Tensor,
    log_rate: Tensor,
    skip: Tensor,
    document: Tensor | None = None,
    state: Tensor | None = None,
    ended: Tensor | None = None,
    *,
    head_dim: int,
    state_dim: int,
    min_step: float = 0.0,
    states_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the result of `mamba_scan` and the states [b, heads, n, p] after the last token, from the states `state`
    before the first, default 0. Tokens where `ended` [s, b, 1] is True change no state."""
    x, b, c = widened(mixed).split([mixed.shape[-1] - 2 * state_dim, state_dim, state_dim], -1)
    heads = x.reshape(*x.shape[:2], -1, head_dim)  # [s, b, heads, p]
    size = F.softplus(widened(step.flatten(2)) + widened(step_bias))
    if min_step > 0.0:
        size = size.clamp(min=min_step)
    if ended is not None:
        size = size.masked_fill(ended, 0.0)
    output, state = ssd(heads, size, -widened(log_rate).exp(), b, c, document, state, states_dtype=states_dtype)
    return (output + widened(skip)[:, None] * heads).reshape(x.shape), state
