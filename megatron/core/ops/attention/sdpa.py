"""Scaled dot-product attention by torch's fused kernels. On a GPU cuDNN's kernel comes first."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.ops.attention.blocks_cuda import FLASH_WIDTH_MULTIPLE, cudnn_takes, round_up
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, hidden_keys

_ANY_ORDER = [
    SDPBackend.CUDNN_ATTENTION,  # the fastest on a GPU that has it
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""The order in which torch tries its kernels on a GPU."""


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, call: AttentionCall) -> Tensor:
    """Computes `unfused.attention` on a CPU, without dropout and sink. Packed documents are computed one by one."""
    if query.dtype is torch.float16:  # see ops/linear.py
        return sdpa_attention(query.float(), key.float(), value.float(), variant, call).half()
    if call.cu_seqlens is not None:
        return _documents(query, key, value, variant, call.cu_seqlens)
    return _whole(query, key, value, variant, call, fills=True)


def sdpa_attention_cuda(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, call: AttentionCall
) -> Tensor:
    """Computes `unfused.attention` on a GPU, without dropout, sink and packed documents."""
    with sdpa_kernel(_ANY_ORDER, set_priority=True):
        return _whole(query, key, value, variant, call, fills=not _cudnn_takes(query, key, value))


def sdpa_attention_cudnn(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, call: AttentionCall
) -> Tensor:
    """Computes what `sdpa_attention_cuda` does by cuDNN's kernel only; raises torch's RuntimeError if that cannot."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _whole(query, key, value, variant, call, fills=not _cudnn_takes(query, key, value))


def sdpa_attention_flash(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, call: AttentionCall
) -> Tensor:
    """Computes what `sdpa_attention_cuda` does by the flash kernel only; raises torch's RuntimeError if that cannot."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _whole(query, key, value, variant, call, fills=True)


def first_usable_kernel(
    head_size: int, heads: int, groups: int, dtype: torch.dtype, value_size: int | None = None
) -> str:
    """Returns the name of the kernel that `sdpa_attention_cuda` uses for causal training on this GPU."""
    widths = head_size, value_size or head_size
    device, strict = torch.device("cuda", torch.cuda.current_device()), torch.are_deterministic_algorithms_enabled()
    if widths[0] != widths[1] and not cudnn_takes(heads, groups, *widths, dtype, device, strict):
        widths = max(widths), max(widths)
    shapes = [(1, heads, 128, widths[0]), (1, groups, 128, widths[0]), (1, groups, 128, widths[1])]
    query, key, value = (torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes)
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, heads != groups)
    if torch.backends.cuda.can_use_cudnn_attention(parameters):
        return "cuDNN"
    if torch.backends.cuda.can_use_flash_attention(parameters):
        return "flash"
    return "efficient" if torch.backends.cuda.can_use_efficient_attention(parameters) else "math"


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, call: AttentionCall
) -> Tensor:
    """Computes `unfused.attention` of packed documents on a GPU in half precision, without dropout, sink and mask, by
    the flash kernel for sequences of different lengths (Dao 2023)."""
    assert call.cu_seqlens is not None and call.max_seqlen is not None and call.mask is None
    if query.shape[1] > 1:
        return rows_end_to_end(varlen_attention, query, key, value, variant, call)
    width = value.shape[3]
    query, key, value = of_one_width(query, key, value, FLASH_WIDTH_MULTIPLE)
    left, right = variant.reach
    compute, takes_groups = _varlen_kernel()
    key, value = key.squeeze(1), value.squeeze(1)  # [t, g, d]
    grouped = {"enable_gqa": query.shape[2] != key.shape[1]} if takes_groups else {}
    if not takes_groups:
        shared = query.shape[2] // key.shape[1]
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    context = compute(
        query.squeeze(1),  # [t, a, d]
        key,
        value,
        call.cu_seqlens,
        call.cu_seqlens,
        call.max_seqlen,
        call.max_seqlen,
        scale=variant.scale,
        window_size=(-1 if left is None else left, -1 if right is None else right),
        **grouped,
    )
    assert isinstance(context, Tensor)
    return context[..., :width].unsqueeze(1)


def rows_end_to_end(
    compute: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: AttentionVariant,
    call: AttentionCall,
) -> Tensor:
    """Computes several rows that share their boundaries (chunked attention) as one packed row, by `compute`."""
    assert call.cu_seqlens is not None
    s, b = query.shape[:2]
    row = torch.arange(b, device=query.device)[:, None] * s
    edges = torch.cat([(call.cu_seqlens[:-1] + row).flatten(), row.new_full((1,), b * s)]).to(torch.int32)
    query, key, value = (heads.transpose(0, 1).reshape(-1, 1, *heads.shape[2:]) for heads in (query, key, value))
    context = compute(query, key, value, variant, dataclasses.replace(call, cu_seqlens=edges))
    return context.view(b, s, *context.shape[2:]).transpose(0, 1)


@functools.cache
def _varlen_kernel() -> tuple[Callable[..., object], bool]:
    """Returns torch's kernel, and whether it supports grouped query attention itself (older releases do not).

    Imported here because the module imports torch's compiler and Triton, which only packed documents on a GPU need.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def of_one_width(query: Tensor, key: Tensor, value: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Returns heads of equal width, a multiple of `multiple`. The added channels are zero, so they change neither the
    scores nor the other channels."""
    wider = round_up(max(query.shape[3], value.shape[3]), multiple)
    query, key, value = (
        heads if heads.shape[3] == wider else F.pad(heads, (0, wider - heads.shape[3])) for heads in (query, key, value)
    )
    return query, key, value


def _cudnn_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the heads need no padding: keys and values have one width, or cuDNN takes both widths."""
    widths = query.shape[3], value.shape[3]
    heads, strict = (query.shape[2], key.shape[2]), torch.are_deterministic_algorithms_enabled()
    return widths[0] == widths[1] or cudnn_takes(*heads, *widths, query.dtype, query.device, strict)


def _whole(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, call: AttentionCall, fills: bool
) -> Tensor:
    """Calls torch's SDPA. `fills` pads keys and values to one width."""
    width = value.shape[3]
    if fills:
        query, key, value = of_one_width(query, key, value)
    sq, sk = query.shape[0], key.shape[0]
    at_end = call.query_positions is None and (sq == sk or not variant.causal)
    plain = call.mask is None and variant.window is None and at_end
    visible = None if plain else _visible_keys(variant, call, sq, sk, query.device)
    context = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),  # [b, a, sq, d], a view
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=visible,
        is_causal=plain and variant.causal,
        scale=variant.scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return context.permute(2, 0, 1, 3)[..., :width]  # [sq, b, a, dv]


def _visible_keys(
    variant: AttentionVariant, call: AttentionCall, sq: int, sk: int, device: torch.device
) -> Tensor | None:
    """Returns the keys that the queries see, as SDPA's mask; None: all. Layers that are called with the same tensor of
    positions share one mask, which is kept with that tensor: text generation would make one per layer and token."""
    positions = call.query_positions
    if positions is None or positions.is_inference() or call.mask is not None or call.cu_seqlens is not None:
        hidden = hidden_keys(variant, call, 0, sq, sq, sk, device)
        return None if hidden is None else ~hidden
    masks: dict[object, Tensor | None] = getattr(positions, "visible_keys", {})
    key = positions._version, sq, sk, variant.reach
    if key not in masks:
        hidden = hidden_keys(variant, call, 0, sq, sq, sk, device)
        masks[key] = None if hidden is None else ~hidden
        positions.visible_keys = masks  # type: ignore[attr-defined]
    return masks[key]


def _documents(query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, cu_seqlens: Tensor) -> Tensor:
    """Computes each document by itself. A CPU can read the boundaries, and no score between documents is computed."""
    alone = AttentionCall()
    edges = cu_seqlens.tolist()
    documents = [slice(first, end) for first, end in itertools.pairwise(edges) if end > first]
    return torch.cat([_whole(query[part], key[part], value[part], variant, alone, True) for part in documents])
