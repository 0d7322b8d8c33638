"""Attention by torch's flex_attention (Dong et al. 2024): torch's compiler generates a kernel for a layer's rules about
scores and keys."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant


def flex_attention_cuda(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, call: AttentionCall
) -> Tensor:
    """Computes `unfused.attention` on a GPU, also in float32, without dropout and bias. A mask may only hide keys from
    all queries. A query that sees no key gets zeros."""
    sq, a, sk = query.shape[0], query.shape[2], key.shape[0]
    arguments: dict[str, Any] = {
        "score_mod": _score_rule(variant, call, a, sk - sq, query.device),
        "block_mask": _mask_of(variant, call, sq, sk, query.device),
        "scale": variant.scale,
        "enable_gqa": a != key.shape[2],
    }
    context, lse = _kernel(query.device.type)(
        *(heads.permute(1, 2, 0, 3) for heads in (query, key, value)), return_lse=True, **arguments
    )  # [b, a, sq, dv], [b, a, sq]
    if call.sink is not None:
        share = torch.exp(lse - torch.logaddexp(lse, call.sink.to(lse.dtype)[None, :, None]))
        context = (context * share[..., None]).to(query.dtype)
    result: Tensor = context.permute(2, 0, 1, 3)
    return result


@functools.cache
def _kernel(device_type: str) -> Callable[..., Any]:
    """Returns flex_attention, compiled on a GPU. Imported here because it imports torch's compiler."""
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Callable[..., Any] = flex_attention
    return torch.compile(kernel, dynamic=False) if device_type == "cuda" else kernel


def _score_rule(
    variant: AttentionVariant, call: AttentionCall, heads: int, ahead: int, device: torch.device
) -> Callable[..., Tensor] | None:
    """Returns the change of a scaled score; None: no change. Query i has the position of key i + `ahead`."""
    cap = variant.cap
    if cap is None and variant.slopes is None:
        return None
    slopes = None
    if variant.slopes is not None:
        slopes = _slopes_on(variant.slopes[call.first_head : call.first_head + heads], device)

    def change(score: Tensor, row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score - slopes[head] * (i + ahead - j).abs()
        return score

    return change


@functools.lru_cache(maxsize=64)
def _slopes_on(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _mask_of(variant: AttentionVariant, call: AttentionCall, sq: int, sk: int, device: torch.device) -> Any:
    """Returns the blocks of keys that queries see; None: all."""
    reach = variant.reach
    if call.cu_seqlens is None and call.mask is None:
        return None if reach == (None, None) else _mask_of_rows(reach, sq, sk, device)
    if call.mask is not None:
        return _build_mask(reach, sq, sk, device, call.cu_seqlens, call.mask)
    assert call.cu_seqlens is not None
    key, version = (reach, sq, sk), call.cu_seqlens._version  # scripts may reuse a tensor for other boundaries
    last = _LAST.get(key)
    if last is None or last[0]() is not call.cu_seqlens or last[1] != version:
        last = weakref.ref(call.cu_seqlens), version, _build_mask(reach, sq, sk, device, call.cu_seqlens, None)
        _LAST[key] = last
    return last[2]


_LAST: dict[Any, tuple[weakref.ref[Tensor], int, Any]] = {}
"""The last mask of packed documents, by reach and sizes, with the boundaries and their version. All layers of a
micro-batch have the same boundaries."""


@functools.lru_cache(maxsize=16)
def _mask_of_rows(reach: tuple[int | None, int | None], sq: int, sk: int, device: torch.device) -> Any:
    return _build_mask(reach, sq, sk, device, None, None)


def _build_mask(
    reach: tuple[int | None, int | None],
    sq: int,
    sk: int,
    device: torch.device,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
) -> Any:
    """`mask` [b or 1, 1, 1, sk] hides keys where it is True."""
    from torch.nn.attention.flex_attention import create_block_mask

    (left, right), ahead = reach, sk - sq
    document = None
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens, torch.arange(sk, device=device, dtype=cu_seqlens.dtype), right=True)
    seen = None if mask is None else ~mask[:, 0, 0]
    rows = None if seen is None or seen.shape[0] == 1 else seen.shape[0]

    def sees(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = j >= 0
        if right is not None:
            found = found & (j <= i + ahead + right)
        if left is not None:
            found = found & (j >= i + ahead - left)
        if document is not None:
            found = found & (document[i + ahead] == document[j])
        if seen is not None:
            found = found & (seen[0, j] if rows is None else seen[row, j])
        return found

    return create_block_mask(sees, rows, None, sq, sk, device=device)
