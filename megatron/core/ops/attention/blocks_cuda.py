"""Attention blocks by fused GPU kernels in half precision: cuDNN's for full and causal blocks, flash (Dao 2023) for
windows and packed documents.

Both kernels return the log-sum-exp. Both compute a block's gradients from the final output and log-sum-exp of its
queries, which may cover more keys than the block's, so they work for split rows and for sinks.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.attention.blocks import BlockCall, BlockOffsets
from megatron.core.ops.attention.unfused import AttentionVariant
from megatron.core.utils.torch_private import (
    cudnn_attention_backward,
    cudnn_attention_forward,
    flash_attention_backward,
    flash_attention_forward,
)

Window = tuple[int, int]
"""The flash kernel's window: query i of sq sees keys from i + (sk - sq) - left to i + (sk - sq) + right; -1: no
limit."""


@dataclass(frozen=True)
class Lengths:
    """Sequences that are packed end to end in one kernel call."""

    queries: Tensor
    """Boundaries of the sequences' queries, int32 [sequences + 1]."""
    keys: Tensor
    """Boundaries of the sequences' keys. Keys before the first and after the last boundary are seen by no query."""
    longest: tuple[int, int]
    """Upper bounds of the queries and keys of one sequence."""


@dataclass(frozen=True)
class Documents:
    """The packed documents of a row, cut to one block."""

    lengths: Lengths
    query_sees: Tensor | None
    """bool [sq]: queries that see at least one key; None: all."""
    key_is_seen: Tensor | None
    """bool [sk]: keys that at least one query sees; None: all."""


def fused_block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: BlockOffsets,
    variant: AttentionVariant,
    call: BlockCall,
    with_cudnn: bool = True,
) -> tuple[Tensor, Tensor]:
    """Computes `blocks.block_attention` without dropout; packed documents need causal attention. Each query of the
    block must see at least one key, except for packed documents."""
    if call.cu_seqlens is None:
        if with_cudnn and _for_cudnn(query, key, value, offsets):
            return cudnn_forward(query, key, value, variant.scale, offsets.right == 0)
        return flash_forward(query, key, value, variant.scale, _window(query, key, offsets), None)
    documents = _documents_of(query, key, offsets, call)
    output, lse = flash_forward(query, key, value, variant.scale, _window(query, key, offsets), documents.lengths)
    if documents.query_sees is not None:
        lse = lse.masked_fill(~documents.query_sees, -torch.inf)
    return output, lse


def fused_block_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    offsets: BlockOffsets,
    variant: AttentionVariant,
    call: BlockCall,
    with_cudnn: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `blocks.block_attention_backward`."""
    tensors = (gradient, query, key, value, output)
    if call.cu_seqlens is None:
        if with_cudnn and _for_cudnn(query, key, value, offsets):
            return cudnn_backward(*tensors, lse, variant.scale, offsets.right == 0)
        return flash_backward(*tensors, lse, variant.scale, _window(query, key, offsets), None)
    documents = _documents_of(query, key, offsets, call)
    if documents.query_sees is not None:
        lse = lse.masked_fill(~documents.query_sees, torch.inf)  # makes their probabilities 0
    query_part, *key_parts = flash_backward(
        *tensors, lse, variant.scale, _window(query, key, offsets), documents.lengths
    )
    if documents.key_is_seen is not None:  # the kernel leaves these unwritten, so they may be NaN
        unseen = ~documents.key_is_seen[:, None, None, None]
        key_parts = [part.masked_fill(unseen, 0.0) for part in key_parts]
    return query_part, key_parts[0], key_parts[1]


def _window(query: Tensor, key: Tensor, offsets: BlockOffsets) -> Window:
    """Returns the block's limits as the flash kernel counts them, which aligns the last query with the last key. Blocks
    are as small as possible, so no limit is negative then."""
    longer = key.shape[0] - query.shape[0]
    left = -1 if offsets.left is None else offsets.left + longer
    right = -1 if offsets.right is None else offsets.right - longer
    assert left >= 0 or offsets.left is None
    assert right >= 0 or offsets.right is None
    return left, right


def _documents_of(query: Tensor, key: Tensor, offsets: BlockOffsets, call: BlockCall) -> Documents:
    """Returns the row's documents cut to a block. The boundaries stay on the device; nothing waits for them."""
    assert call.cu_seqlens is not None and call.max_seqlen is not None
    sq, sk, edges = query.shape[0], key.shape[0], call.cu_seqlens
    if offsets.query_start == offsets.key_start and sq == sk:
        within = (edges - offsets.query_start).clamp(0, sq)
        longest = min(sq, call.max_seqlen)
        return Documents(Lengths(within, within, (longest, longest)), None, None)
    # Two disjoint stretches of a row share at most one document: the one that contains the first query.
    assert offsets.key_start + sk <= offsets.query_start, "causal attention to packed documents"
    first = edges.new_full((1,), offsets.query_start)
    document = torch.bucketize(first, edges[1:], right=True)  # [1]
    start = (edges.gather(0, document) - offsets.key_start).clamp(0, sk)
    end = (edges.gather(0, document + 1) - offsets.query_start).clamp(0, sq)
    queries = torch.arange(
        0, 2 * sq, sq, dtype=torch.int32, device=edges.device
    )  # all queries, so that windows stay aligned
    lengths = Lengths(queries, torch.cat([start, start.new_full((1,), sk)]), (sq, sk))
    query_sees = (torch.arange(sq, device=edges.device) < end) & (start < sk)
    return Documents(lengths, query_sees, torch.arange(sk, device=edges.device) >= start)


# ---------------------------------------------------------------------------------------------------------------------
# The kernels, in our shapes: query [sq, b, a, d], key [sk, b, g, d], value [sk, b, g, dv], lse [b, a, sq] in float32


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window, lengths: Lengths | None
) -> tuple[Tensor, Tensor]:
    """Returns output and lse. With `lengths` (b = 1) queries see keys of their own sequence only."""
    tensors = [_flash_layout(tensor, lengths, _flash_width(query, value)) for tensor in (query, key, value)]
    output, lse, *_ = flash_attention_forward(
        *tensors,
        *_extents(query, key, lengths),
        0.0,
        False,
        False,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return _our_layout(output, lengths, value.shape[3]), lse if lengths is None else lse[None]


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
    window: Window,
    lengths: Lengths | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value."""
    width = _flash_width(query, value)
    tensors = [_flash_layout(tensor, lengths, width) for tensor in (gradient, query, key, value, output)]
    unused = query.new_empty(2, dtype=torch.uint64)  # the state of dropout
    gradients = flash_attention_backward(
        *tensors,
        (lse if lengths is None else lse[0]).contiguous(),
        *_extents(query, key, lengths),
        0.0,
        False,
        unused,
        unused,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    widths = query.shape[3], key.shape[3], value.shape[3]
    query_part, key_part, value_part = (
        _our_layout(part, lengths, width) for part, width in zip(gradients, widths, strict=True)
    )
    return query_part, key_part, value_part


def _extents(query: Tensor, key: Tensor, lengths: Lengths | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    if lengths is None:
        return None, None, query.shape[0], key.shape[0]
    return lengths.queries, lengths.keys, *lengths.longest


FLASH_WIDTH_MULTIPLE = 8
"""The flash kernels take heads whose width is a multiple of this, the same for keys and values."""


def round_up(count: int, multiple: int) -> int:
    """Returns the smallest multiple that is not less than `count`."""
    return -(-count // multiple) * multiple


def _flash_width(query: Tensor, value: Tensor) -> int:
    """Returns the width to which all heads of a call of the flash kernel are padded."""
    return round_up(max(query.shape[3], value.shape[3]), FLASH_WIDTH_MULTIPLE)


def _flash_layout(heads: Tensor, lengths: Lengths | None, width: int) -> Tensor:
    """Returns heads [s, b, a, d] as [b, s, a, width], or as [s, a, width] with `lengths`. The added channels are zero,
    so they change neither the scores nor the other channels."""
    heads = F.pad(heads, (0, width - heads.shape[3]))
    return heads.squeeze(1) if lengths is not None else heads.transpose(0, 1)


def _our_layout(heads: Tensor, lengths: Lengths | None, width: int) -> Tensor:
    heads = heads.unsqueeze(1) if lengths is not None else heads.transpose(0, 1)
    return heads[..., :width]


def cudnn_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Returns output and lse."""
    tensors = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]  # [b, a, s, d]
    output, lse, *_ = cudnn_attention_forward(*tensors, None, True, 0.0, causal, False, scale=scale)
    return output.permute(2, 0, 1, 3), lse.view(lse.shape[:3])


def cudnn_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value."""
    tensors = [tensor.permute(1, 2, 0, 3) for tensor in (gradient, query, key, value, output)]
    unused = query.new_empty((), dtype=torch.int64)  # the state of dropout
    gradients = cudnn_attention_backward(
        *tensors,
        lse.contiguous()[..., None],
        unused,
        unused,
        None,
        None,
        None,
        query.shape[0],
        key.shape[0],
        0.0,
        causal,
        scale=scale,
    )
    query_part, key_part, value_part = (part.permute(2, 0, 1, 3) for part in gradients)
    return query_part, key_part, value_part


def _for_cudnn(query: Tensor, key: Tensor, value: Tensor, offsets: BlockOffsets) -> bool:
    """Whether this GPU's cuDNN can compute the block: a full or a causal one."""
    square = query.shape[0] == key.shape[0]
    if offsets.left is not None or not (offsets.right is None or (offsets.right == 0 and square)):
        return False
    heads = query.shape[2], key.shape[2], query.shape[3], value.shape[3]
    return cudnn_takes(*heads, query.dtype, query.device, torch.are_deterministic_algorithms_enabled())


@functools.lru_cache(maxsize=64)
def cudnn_takes(
    heads: int, groups: int, width: int, value_width: int, dtype: torch.dtype, device: torch.device, deterministic: bool
) -> bool:
    """Whether cuDNN can compute such heads on a device, forward and backward."""
    shapes = [(1, heads, 128, width), (1, groups, 128, width), (1, groups, 128, value_width)]
    query, key, value = (torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, heads != groups)
    # Asking fails where a build for CUDA finds no GPU: on a login node, which counts memory.
    return torch.cuda.is_available() and torch.backends.cuda.can_use_cudnn_attention(parameters)
