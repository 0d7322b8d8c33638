"""The gated delta rule in chunks of tokens: matrix products within a chunk, a loop over chunks for the state."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.decays import sums_between
from megatron.core.ops.precision import widened

CHUNK_SIZE = 64
"""Tokens of a chunk. A larger number makes the products within chunks larger and the loop over chunks shorter."""


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    document: Tensor | None = None,
    state: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Returns what `gated_delta_rule_recurrent` returns, for the same arguments, in chunks of `chunk_size` tokens.

    The corrections of a chunk's tokens solve a triangular system. Its solution is linear in the state S before the
    chunk: U - W S (the WY form: Yang et al. 2024, arXiv:2412.06464, section 3.3). U and W are computed for all chunks
    at once. A loop over chunks then computes the states, and the outputs follow from the states for all chunks at once.
    Computed in float32 at least.
    """
    length, batch, heads, width = value.shape
    groups = key.shape[2]
    size = min(chunk_size, length)
    count = -(-length // size)

    def in_chunks(tensor: Tensor) -> Tensor:
        """[s, b, heads, ...] to [chunks, b, g, heads / g, C, ...] in float32 at least, with zeros after the row."""
        padded = F.pad(widened(tensor), (0, 0) * (tensor.dim() - 1) + (0, count * size - length))
        split = padded.unflatten(2, (groups, -1)).unflatten(0, (count, size))
        return split.movedim(1, 4)

    query, key, value_, beta_ = (in_chunks(tensor) for tensor in (query, key, value, beta))
    decay = _decay(in_chunks(log_decay), document)
    beta_ = beta_.unsqueeze(-1)
    similar = key @ key.transpose(-1, -2)  # [chunks, b, g, 1, C, C]
    system = beta_ * similar * decay.between  # its strict lower triangle, with ones on the diagonal
    right = torch.cat([beta_ * value_, beta_ * decay.since_start * key], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, from_state = solved.split([width, key.shape[-1]], -1)  # U [.., C, dv], W [.., C, dk]
    written = (decay.until_end * key).transpose(-1, -2)
    if state is None:
        carried = own.new_zeros(batch, groups, heads // groups, key.shape[-1], width)
    else:
        carried = state.to(own.dtype).unflatten(1, (groups, -1))
    states, corrections = [], []
    for chunk in range(count):
        states.append(carried)
        corrections.append(own[chunk] - from_state[chunk] @ carried)
        carried = decay.through[chunk] * carried + written[chunk] @ corrections[-1]
    read = (decay.since_start * query) @ torch.stack(states)
    within = (query @ key.transpose(-1, -2) * decay.between) @ torch.stack(corrections)
    output = (read + within).movedim(4, 1).flatten(0, 1)[:length].flatten(2, 3)
    return output.to(value.dtype), carried.flatten(1, 2)


@dataclass(frozen=True)
class _Decay:
    """Factors by which a state fades between two places of a chunk. They are 0 across a border of documents."""

    between: Tensor
    """From token j to token i of a chunk, [chunks, b, g, v / g, C, C]; 0 where j is after i."""
    since_start: Tensor
    """From the state before the chunk to each token, [.., C, 1]."""
    until_end: Tensor
    """From each token to the end of the chunk, [.., C, 1]."""
    through: Tensor
    """From the state before the chunk to its end, [.., 1, 1]."""


def _decay(log_decay: Tensor, document: Tensor | None) -> _Decay:
    """Computes the factors for log_decay [chunks, b, g, v / g, C] and the number [s] of each token's document."""
    count, size = log_decay.shape[0], log_decay.shape[-1]
    visible = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    since_start = log_decay.cumsum(-1).exp()
    through = since_start[..., -1:]
    if document is not None:
        number = F.pad(document[None].double(), (0, count * size - document.shape[0]), "replicate").view(count, size)
        before = torch.cat([number[:1, 0], number[:-1, -1]])[:, None]  # of the last token before each chunk
        last = number[:, -1:]
        shape = (count, 1, 1, 1, size)
        visible = visible & (number[:, :, None] == number[:, None, :])[:, None, None, None]
        since_start = since_start * (number == before).view(shape)
        through = through * (last == before).view(count, 1, 1, 1, 1)
    between = sums_between(log_decay).masked_fill(~visible, float("-inf")).exp()
    return _Decay(between, since_start[..., None], between[..., -1, :, None], through[..., None])
