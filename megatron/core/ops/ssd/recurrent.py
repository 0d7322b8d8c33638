"""The state space recurrence of Mamba-2 token by token: the definition."""

import torch
from torch import Tensor

from megatron.core.ops.precision import widened


def ssd_recurrent(
    x: Tensor,
    step: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
    document: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (y [s, b, h, p], last state [b, h, n, p]) of the recurrence of each head (Dao and Gu 2024,
    arXiv:2405.21060, equation 1):

        S_t = exp(rate step_t) S_(t-1) + step_t B_t x_t^T        y_t = S_t^T C_t

    x [s, b, h, p], step sizes [s, b, h], rates [h] (negative), `b` and `c` [s, b, g, n]; h / g consecutive heads share
    a group's B and C. S begins as `state` [b, h, n, p], default 0, and a new `document` [s] begins with 0. Computed in
    float32 at least; y has the type of x.
    """
    length, batch, heads, width = x.shape
    shared = heads // b.shape[2]
    wide, b, c = widened(x), widened(b).repeat_interleave(shared, 2), widened(c).repeat_interleave(shared, 2)
    step = step.to(wide.dtype)
    decay = (step * rate.to(wide.dtype)).exp()
    if state is None:
        state = wide.new_zeros(batch, heads, b.shape[-1], width)
    outputs = []
    for token in range(length):
        if document is not None and token and document[token] != document[token - 1]:
            state = torch.zeros_like(state)
        added = (step[token, ..., None] * b[token])[..., None] * wide[token, :, :, None]
        state = decay[token, ..., None, None] * state + added
        outputs.append((state * c[token, ..., None]).sum(-2))
    return torch.stack(outputs).to(x.dtype), state
