"""Stand-ins for the attention kernels of GPUs, written from their documentation in plain float64 operations, so that
the code around the kernels is tested on any machine."""

import itertools

import torch
from torch import Tensor

from megatron.core.ops.attention import blocks_cuda as kernels


def sequences(query: Tensor, key: Tensor, lengths: kernels.Lengths | None) -> list[tuple[slice, slice]]:
    if lengths is None:
        return [(slice(0, len(query)), slice(0, len(key)))]
    rows = [[slice(*pair) for pair in itertools.pairwise(e.tolist())] for e in (lengths.queries, lengths.keys)]
    for found, longest in zip(rows, lengths.longest, strict=True):
        assert max(r.stop - r.start for r in found) <= longest
    return list(zip(*rows, strict=True))


def scores(query: Tensor, key: Tensor, scale: float, window: kernels.Window) -> Tensor:
    """Returns scores [b, a, sq, sk]. The last query is at the position of the last key."""
    keys = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
    distance = torch.arange(len(key)) - torch.arange(len(query))[:, None] - (len(key) - len(query))
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if window[0] >= 0:
        hidden |= distance < -window[0]
    if window[1] >= 0:
        hidden |= distance > window[1]
    return torch.einsum("ibad,jbad->baij", query, keys).mul(scale).masked_fill(hidden, -torch.inf)


def flash_forward(query, key, value, scale, window, lengths) -> tuple[Tensor, Tensor]:
    """A query that sees no key has output 0 and lse +inf, as in flash attention."""
    s, b, a, _ = query.shape
    output, lse = query.new_full((s, b, a, value.shape[3]), torch.nan), query.new_full((b, a, s), torch.nan)
    for q, k in sequences(query, key, lengths):
        found = scores(query[q], key[k], scale, window)
        sums = found.logsumexp(-1) if found.shape[-1] else found.new_full(found.shape[:3], -torch.inf)
        weights = torch.exp(found - sums.clamp(min=-1e300)[..., None])
        values = value[k].repeat_interleave(a // value.shape[2], 2)
        output[q] = torch.einsum("baij,jbad->ibad", weights, values)
        lse[..., q] = sums.where(sums > -torch.inf, torch.inf)
    return output, lse


def flash_backward(gradient, query, key, value, output, lse, scale, window, lengths) -> tuple[Tensor, Tensor, Tensor]:
    """Rows outside of all sequences are not written."""
    gradients = tuple(torch.full_like(tensor, torch.nan) for tensor in (query, key, value))
    shared, groups = query.shape[2] // key.shape[2], key.shape[2]
    for q, k in sequences(query, key, lengths):
        weights = torch.exp(scores(query[q], key[k], scale, window) - lse[..., q, None])
        keys, values = (tensor[k].repeat_interleave(shared, 2) for tensor in (key, value))
        delta = (gradient[q] * output[q]).sum(-1).permute(1, 2, 0)[..., None]
        back = weights * (torch.einsum("ibad,jbad->baij", gradient[q], values) - delta) * scale
        gradients[0][q] = torch.einsum("baij,jbad->ibad", back, keys)
        for total, matrix, rows in ((gradients[1], back, query[q]), (gradients[2], weights, gradient[q])):
            total[k] = torch.einsum("baij,ibad->jbad", matrix, rows).unflatten(2, (groups, shared)).sum(3)
    return gradients


def cudnn_forward(query, key, value, scale, causal) -> tuple[Tensor, Tensor]:
    assert not causal or len(query) == len(key)
    return flash_forward(query, key, value, scale, (-1, 0 if causal else -1), None)


def cudnn_backward(*tensors_and_scale) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, scale, causal = tensors_and_scale
    return flash_backward(*tensors, scale, (-1, 0 if causal else -1), None)


def put_in_place() -> None:
    """Replaces the kernels in this process, for every device."""
    for function in (flash_forward, flash_backward, cudnn_forward, cudnn_backward):
        setattr(kernels, function.__name__, function)
    kernels.cudnn_takes = lambda *heads: True  # type: ignore[assignment]
