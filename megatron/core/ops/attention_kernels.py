"""The implementations of attention, and what each declares that it can do."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.ops.attention import AttentionCall, AttentionVariant, attention
from megatron.core.ops.attention_sdpa import (
    sdpa_attention,
    sdpa_attention_cuda,
    sdpa_attention_cudnn,
    sdpa_attention_flash,
    varlen_attention,
)
from megatron.core.transformer.enums import AttnBackend


@dataclass(frozen=True)
class Situation:
    """Under what circumstances an attention layer is called."""

    device_type: str
    dtype: torch.dtype
    training: bool
    """Dropout applies."""
    packed: bool
    """Several documents lie end to end."""


Refusal = str | None
Compute = Callable[[Tensor, Tensor, Tensor, AttentionVariant, AttentionCall], Tensor]


@dataclass(frozen=True)
class AttentionKernel:
    """An implementation of `ops.attention.attention`."""

    name: str
    compute: Compute
    refusal: Callable[[AttentionVariant, Situation], Refusal]
    """Why it cannot compute a variant in a situation; None: it can."""


def _fused_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    if situation.training and variant.dropout:
        return f"it has no dropout masks of ours (attention dropout {variant.dropout})"
    return "it has no softmax sink" if variant.sink else None


def _cpu_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    return "it is for CPUs" if situation.device_type != "cpu" else _fused_refusal(variant, situation)


def _cuda_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    if situation.device_type != "cuda" or situation.packed:
        return "it is for documents that are not packed, on CUDA"
    return _fused_refusal(variant, situation)


def _half_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    if situation.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in half precision, not in {situation.dtype}"
    return None


def _cuda_half_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    return _cuda_refusal(variant, situation) or _half_refusal(variant, situation)


def _varlen_refusal(variant: AttentionVariant, situation: Situation) -> Refusal:
    if situation.device_type != "cuda" or not situation.packed:
        return "it is for packed documents, on CUDA"
    return _half_refusal(variant, situation) or _fused_refusal(variant, situation)


SDPA_CUDA = AttentionKernel("SDPA (cuDNN, flash, efficient, math)", sdpa_attention_cuda, _cuda_refusal)
SDPA_CUDNN = AttentionKernel("SDPA (cuDNN)", sdpa_attention_cudnn, _cuda_half_refusal)
SDPA_FLASH = AttentionKernel("SDPA (flash)", sdpa_attention_flash, _cuda_half_refusal)
VARLEN = AttentionKernel("variable-length flash", varlen_attention, _varlen_refusal)
SDPA_CPU = AttentionKernel("SDPA (CPU flash)", sdpa_attention, _cpu_refusal)
UNFUSED = AttentionKernel("unfused", attention, lambda variant, situation: None)

CANDIDATES = {
    AttnBackend.auto: (SDPA_CUDA, VARLEN, SDPA_CPU, UNFUSED),
    AttnBackend.fused: (SDPA_CUDNN, VARLEN, SDPA_CPU, UNFUSED),
    AttnBackend.flash: (SDPA_FLASH, VARLEN, SDPA_CPU, UNFUSED),
    AttnBackend.unfused: (UNFUSED,),
    AttnBackend.local: (UNFUSED,),
}
"""For what a config asks, in order of preference; the last takes everything."""
