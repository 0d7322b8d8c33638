"""The gated delta rule, token by token: the definition."""

import torch
from torch import Tensor

from megatron.core.ops.precision import widened


def gated_delta_rule_recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    document: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [s, b, v, dv], in the values' type, and the last state [b, v, dk, dv], in float32 at least.

    Each of v value heads has a matrix S that maps keys to values. A token with query q, key k and value w first lets S
    fade, then corrects what S returns for its key, then reads (Yang et al. 2024, arXiv:2412.06464, eq. 10):

        S <- exp(log_decay) S;   S <- S + beta k (w - S^T k)^T;   output = S^T q

    Queries and keys are [s, b, g, dk]; v is a multiple of g, and consecutive value heads share a key head. `log_decay`
    (at most 0) and `beta` are [s, b, v]. S begins as `state`, default 0, and again as 0 at the first token of each
    packed document but the first; `document` [s] is the number of each token's document.
    """
    heads = value.shape[2] // key.shape[2]
    query, key = (widened(tensor).repeat_interleave(heads, 2) for tensor in (query, key))
    wide, strength, decay = widened(value), widened(beta), widened(log_decay).exp()
    if state is None:
        state = wide.new_zeros(*wide.shape[1:3], key.shape[-1], wide.shape[-1])
    outputs = []
    for t in range(wide.shape[0]):
        state = state * decay[t, :, :, None, None]
        if document is not None and t > 0:
            state = state * (document[t] == document[t - 1])
        known = torch.einsum("bvkd,bvk->bvd", state, key[t])
        correction = strength[t, :, :, None] * (wide[t] - known)
        state = state + torch.einsum("bvk,bvd->bvkd", key[t], correction)
        outputs.append(torch.einsum("bvkd,bvk->bvd", state, query[t]))
    return torch.stack(outputs).to(value.dtype), state
