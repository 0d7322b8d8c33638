"""The implementations of attention, and what each can compute."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from megatron.core.declarations.config_fields import value_text
from megatron.core.ops.attention.blocks import BlockCall, BlockOffsets, block_attention, block_attention_backward
from megatron.core.ops.attention.blocks_cuda import (
    FLASH_WIDTH_MULTIPLE,
    fused_block_attention,
    fused_block_attention_backward,
)
from megatron.core.ops.attention.sdpa import (
    sdpa_attention,
    sdpa_attention_cuda,
    sdpa_attention_cudnn,
    sdpa_attention_flash,
    varlen_attention,
)
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.transformer.enums import AttnBackend


@dataclass(frozen=True)
class Situation:
    """The circumstances in which an attention layer is called."""

    device_type: str
    dtype: torch.dtype
    training: bool
    """Whether dropout applies."""
    packed: bool
    """Whether the rows hold several packed documents."""


T = TypeVar("T")
Refusal = str | None
Fills = Literal["always", "where cuDNN does not take them", "never"]
"""When a kernel needs key and value heads of one width: the narrower ones get channels of zeros."""
Compute = Callable[[Tensor, Tensor, Tensor, AttentionVariant, AttentionCall], Tensor]


@dataclass(frozen=True)
class AttentionKernel:
    """An implementation of `ops.attention.unfused.attention`."""

    name: str
    compute: Compute
    serves: Callable[[Situation], bool]
    """Whether the kernel is meant for this device and kind of batch."""
    refusal: Callable[[AttentionVariant, Situation], Refusal]
    """Returns None if the kernel can compute a variant in a situation that it serves, otherwise the reason why not. The
    reason completes a sentence that begins with the kernel's name, such as "has no ALiBi"."""
    fills: Fills = "never"
    width_multiple: int = 1
    """The width of a head is padded with zeros to a multiple of this."""
    knows_masks_of_documents: bool = False
    """Whether the kernel accepts an attention mask, or positions of the queries, together with packed documents."""
    masks_keys_only: bool = False
    """Whether the kernel accepts no positions of the queries, and only masks [b or 1, 1, 1, sk] that hide keys from all
    queries. It accepts such masks with packed documents too."""
    takes_no_mask: bool = False
    """Whether the kernel accepts neither masks nor positions of the queries."""
    for_selected_keys: bool = False
    """Whether the kernel is meant for layers that select keys, and accepts only calls with their masks, [b or 1, 1, sq,
    sk]."""
    is_preference: bool = False
    """True if `attention_backend` does not ask for this kernel. The next kernel may then compute the calls that this
    one cannot."""

    least_queries: int = 0
    """Calls with fewer queries in a row belong to the next kernel that can compute them."""

    def takes(self, call: AttentionCall, queries: int) -> bool:
        """Whether the kernel computes a call with so many queries in a row, of a layer that it serves."""
        if queries < self.least_queries:
            return False
        if self.for_selected_keys:
            return call.mask is not None and call.mask.shape[1] == 1 and call.mask.shape[2] == queries > 1
        if self.takes_no_mask:
            return call.query_positions is None and call.mask is None
        if self.masks_keys_only:
            return call.query_positions is None and (call.mask is None or call.mask.shape[1:3] == (1, 1))
        special = call.mask is not None or call.query_positions is not None
        return call.cu_seqlens is None or not special or self.knows_masks_of_documents


BlockForward = Callable[[Tensor, Tensor, Tensor, BlockOffsets, AttentionVariant, BlockCall], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class BlockKernel:
    """An implementation of `ops.attention.blocks`."""

    name: str
    forward: BlockForward
    """Has the signature of `block_attention`."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Has the signature of `block_attention_backward`."""
    serves: Callable[[Situation], bool]
    refusal: Callable[[AttentionVariant, Situation], Refusal]
    fills: Fills = "never"
    width_multiple: int = 1


def _fused_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    return (
        _dropout_refusal(variant, situation)
        or _score_refusal(variant)
        or ("has no softmax sink" if variant.sink else None)
    )


def _score_refusal(variant: AttentionVariant) -> Refusal:
    if variant.cap is not None:
        return f"cannot cap scores (at {variant.cap})"
    if variant.slopes is not None:
        return "has no ALiBi"
    return _bias_refusal(variant)


def _bias_refusal(variant: AttentionVariant) -> Refusal:
    return "has no gradient of a relative position bias" if variant.adds_bias else None


def _dropout_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    if situation.training and variant.dropout:
        return f"cannot draw the masks of attention dropout {variant.dropout}"
    return None


def _half_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    return _type_refusal(situation) or _fused_refusal(variant, situation)


def _cudnn_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    if torch.are_deterministic_algorithms_enabled():
        return "sums gradients in an order that varies, which deterministic mode forbids"
    return _half_refusal(variant, situation)


def _flash_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    if variant.padded:
        return "takes no mask of padding"
    if variant.window is not None:
        return "has no windows here"
    return _width_refusal(variant) or _half_refusal(variant, situation)


def _flash3_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    return "takes no mask of padding" if variant.padded else _varlen_refusal(variant, situation)


def _varlen_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    return _width_refusal(variant) or _half_refusal(variant, situation)


def _width_refusal(variant: AttentionVariant) -> Refusal:
    if variant.widths is not None and max(variant.widths) > _WIDEST:
        return f"has heads of at most {_WIDEST} channels, not {max(variant.widths)}"
    return None


def _type_refusal(situation: Situation) -> Refusal:
    if situation.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in half precision, not in {value_text(situation.dtype)}"
    return None


def _block_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    if situation.packed and not variant.causal:
        return "computes packed documents only with causal attention"
    if variant.chunk is not None:
        return "has no chunked attention"
    refusal = _type_refusal(situation) or _dropout_refusal(variant, situation) or _score_refusal(variant)
    return refusal or _width_refusal(variant)


@dataclass(frozen=True)
class OwnFlash:
    """What our own flash attention can compute, and where it is preferred."""

    has_specialized_warps: Callable[[], bool]
    """Whether the kernels with specialised warps run here."""

    def refusal(self, variant: AttentionVariant, situation: Situation) -> Refusal:
        """Returns why the kernels cannot compute a variant, for any kind of rows."""
        if torch.are_deterministic_algorithms_enabled() and not self._sums_in_order(variant):
            return "sums the gradients of queries in an order that varies, which deterministic mode forbids"
        return _width_refusal(variant) or _type_refusal(situation)

    def _sums_in_order(self, variant: AttentionVariant) -> bool:
        """Whether the kernels with specialised warps compute a variant; their sums have an order."""
        plain = _score_refusal(variant) is None and not variant.padded
        return plain and variant.widths in _SPECIALIZED_WIDTHS and self.has_specialized_warps()

    def documents_refusal(self, variant: AttentionVariant, situation: Situation) -> Refusal:
        """Returns why the kernels are no first choice for packed documents."""
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9:
            return "is faster than other kernels from Hopper on only"
        return self.refusal(variant, situation)

    def long_row_refusal(self, variant: AttentionVariant, situation: Situation) -> Refusal:
        """Returns why the kernels are no first choice for long rows of one document."""
        drops = situation.training and variant.dropout
        plain = variant.causal and variant.window is None and variant.chunk is None and not (drops or variant.padded)
        if not plain or variant.widths not in _SPECIALIZED_WIDTHS or _score_refusal(variant) or variant.sink:
            return "is faster for plain causal attention with heads of 64 or 128 channels only"
        return self.refusal(variant, situation)

    def masked_window_refusal(self, variant: AttentionVariant, situation: Situation) -> Refusal:
        """Returns why SDPA leaves a layer to our own kernel."""
        if variant.window is not None and self.documents_refusal(variant, situation) is None:
            return "computes a window as a mask of all pairs of queries and keys, which is slower"
        return _fused_refusal(variant, situation)

    def block_refusal(self, variant: AttentionVariant, situation: Situation) -> Refusal:
        """Returns why the kernels cannot compute blocks of a row that is split over ranks."""
        return self.refusal(variant, situation) or _bias_refusal(variant)


def _on_cpu(situation: Situation) -> bool:
    return situation.device_type == "cpu"


def _on_cuda(situation: Situation) -> bool:
    return situation.device_type == "cuda" and not situation.packed


def _on_any_cuda(situation: Situation) -> bool:
    return situation.device_type == "cuda"


def _on_cuda_packed(situation: Situation) -> bool:
    return situation.device_type == "cuda" and situation.packed


_OWN_FLASH = "our flash attention"
_SPECIALIZED_WIDTHS = ((64, 64), (128, 128))
"""Channels of keys and of values that kernels with specialised warps compute."""
_WIDEST = 256
"""Channels of the widest heads of flash attention: torch's, and our own."""
_WITHOUT_CUDNN: Fills = "where cuDNN does not take them"
LONG_ROW = 2048
"""Tokens of a row from which on our own flash attention with specialised warps is faster than cuDNN
(docs/decisions/own-flash-attention.md). With 1,024 tokens its backward is slower."""

SDPA_CUDA = AttentionKernel(
    "SDPA (cuDNN, flash, efficient, math)", sdpa_attention_cuda, _on_cuda, _fused_refusal, _WITHOUT_CUDNN
)
SDPA_CUDNN = AttentionKernel("SDPA (cuDNN)", sdpa_attention_cudnn, _on_cuda, _cudnn_refusal, _WITHOUT_CUDNN)
SDPA_FLASH = AttentionKernel(
    "SDPA (flash)", sdpa_attention_flash, _on_cuda, _flash_refusal, "always", takes_no_mask=True
)
VARLEN = AttentionKernel(
    "variable-length flash", varlen_attention, _on_cuda_packed, _varlen_refusal, "always", FLASH_WIDTH_MULTIPLE
)
SDPA_CPU = AttentionKernel("SDPA (CPU flash)", sdpa_attention, _on_cpu, _fused_refusal, "always")
UNFUSED = AttentionKernel(
    "plain torch",
    attention,
    lambda situation: True,
    lambda variant, situation: None,
    knows_masks_of_documents=True,
)

FUSED_BLOCKS = BlockKernel(
    "attention in blocks (cuDNN, flash)",
    fused_block_attention,
    fused_block_attention_backward,
    _on_any_cuda,
    _block_refusal,
    _WITHOUT_CUDNN,
)
FLASH_BLOCKS = BlockKernel(
    "attention in blocks (flash)",
    functools.partial(fused_block_attention, with_cudnn=False),
    functools.partial(fused_block_attention_backward, with_cudnn=False),
    _on_any_cuda,
    _block_refusal,
    "always",
    FLASH_WIDTH_MULTIPLE,
)
UNFUSED_BLOCKS = BlockKernel(
    "plain torch in blocks",
    block_attention,
    block_attention_backward,
    lambda situation: True,
    lambda variant, situation: None,
)

CANDIDATES: Mapping[AttnBackend, tuple[AttentionKernel, ...]] = {
    AttnBackend.auto: (SDPA_CUDA, VARLEN, SDPA_CPU, UNFUSED),
    AttnBackend.fused: (SDPA_CUDNN, VARLEN, SDPA_CUDA, SDPA_CPU, UNFUSED),
    AttnBackend.flash: (SDPA_FLASH, VARLEN, SDPA_CUDA, SDPA_CPU, UNFUSED),
    AttnBackend.unfused: (UNFUSED,),
    AttnBackend.local: (UNFUSED,),
}
"""Kernels for each value of `attention_backend`, in order of preference. The last one can compute everything."""

BLOCK_CANDIDATES: Mapping[AttnBackend, tuple[BlockKernel, ...]] = {
    AttnBackend.auto: (FUSED_BLOCKS, UNFUSED_BLOCKS),
    AttnBackend.fused: (FUSED_BLOCKS, UNFUSED_BLOCKS),
    AttnBackend.flash: (FLASH_BLOCKS, UNFUSED_BLOCKS),
    AttnBackend.unfused: (UNFUSED_BLOCKS,),
    AttnBackend.local: (UNFUSED_BLOCKS,),
}
"""Block kernels for rows that are split over ranks, in order of preference."""


def own_flash_kernels(
    own_flash: OwnFlash,
    compute: Compute,
    forward: BlockForward,
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> tuple[AttentionKernel, BlockKernel]:
    """Returns the kernels of `flash_triton`, which need Triton, for whole rows and for blocks."""
    whole = AttentionKernel(_OWN_FLASH, compute, _on_any_cuda, own_flash.refusal, masks_keys_only=True)
    return whole, BlockKernel(f"{_OWN_FLASH} in blocks", forward, backward, _on_any_cuda, own_flash.block_refusal)


def with_own_flash(
    candidates: Mapping[AttnBackend, tuple[AttentionKernel, ...]],
    kernel: AttentionKernel,
    own_flash: OwnFlash,
) -> dict[AttnBackend, tuple[AttentionKernel, ...]]:
    """Returns the candidates with our own flash attention added. It is the last choice before the unfused kernel. With
    `auto` it comes before SDPA for windows, which SDPA computes as masks, and it is the first choice for packed
    documents: it skips tiles outside a document and has no copy of keys for each query head. Where it has specialised
    warps, it is also the first choice for long rows of plain causal layers. With `flash` it comes before kernels that
    are not flash attention."""
    for_long_rows = dataclasses.replace(
        kernel,
        serves=lambda situation: _on_cuda(situation) and own_flash.has_specialized_warps(),
        refusal=own_flash.long_row_refusal,
        takes_no_mask=True,
        least_queries=LONG_ROW,
    )
    for_documents = dataclasses.replace(kernel, serves=_on_cuda_packed, refusal=own_flash.documents_refusal)
    found = before_unfused(candidates, kernel)
    without_windows = dataclasses.replace(SDPA_CUDA, refusal=own_flash.masked_window_refusal)
    auto = [without_windows if other is SDPA_CUDA else other for other in found[AttnBackend.auto]]
    flash = [other for other in candidates[AttnBackend.flash] if other in (SDPA_FLASH, VARLEN)]
    others = [other for other in candidates[AttnBackend.flash] if other not in flash]
    return found | {
        AttnBackend.auto: (for_documents, for_long_rows, *auto[:-1], SDPA_CUDA, auto[-1]),
        AttnBackend.flash: (*flash, kernel, *others),
    }


def with_masked(
    candidates: Mapping[AttnBackend, tuple[AttentionKernel, ...]], compute: Compute
) -> dict[AttnBackend, tuple[AttentionKernel, ...]]:
    """Returns the candidates with the kernels of `masked_triton` as the first choice of layers that select keys."""
    kernel = AttentionKernel(
        "our attention to selected keys", compute, _on_any_cuda, _varlen_refusal, for_selected_keys=True
    )
    return {asked: (kernel, *kernels) if len(kernels) > 1 else kernels for asked, kernels in candidates.items()}


def with_flash3(
    candidates: Mapping[AttnBackend, tuple[AttentionKernel, ...]], compute: Compute
) -> dict[AttnBackend, tuple[AttentionKernel, ...]]:
    """Returns the candidates with FlashAttention-3 as the first choice of `flash`."""
    kernel = AttentionKernel(
        "FlashAttention-3", compute, _on_any_cuda, _flash3_refusal, "always", FLASH_WIDTH_MULTIPLE, takes_no_mask=True
    )
    return {**candidates, AttnBackend.flash: (kernel, *candidates[AttnBackend.flash])}


def before_unfused(candidates: Mapping[AttnBackend, tuple[T, ...]], kernel: T) -> dict[AttnBackend, tuple[T, ...]]:
    """Returns the candidates with one more kernel: the last choice before the unfused one, where there are others."""
    return {
        asked: (*kernels[:-1], kernel, kernels[-1]) if len(kernels) > 1 else kernels
        for asked, kernels in candidates.items()
    }
