"""Attention by Transformer Engine's `DotProductAttention`, whole rows and packed documents."""

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.core.declarations.config_fields import value_text
from megatron.core.ops.attention.kernels import AttentionKernel, Situation
from megatron.core.ops.attention.sdpa import sdpa_attention_cuda
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.ops.transformer_engine.engine import Engine
from megatron.core.transformer.enums import AttnBackend

_MAY_VARY = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
"""The variable by which users allow Transformer Engine kernels whose results differ from run to run; not set: it
does."""


def with_engine_attention(
    engine: Engine, candidates: Mapping[AttnBackend, tuple[AttentionKernel, ...]]
) -> dict[AttnBackend, tuple[AttentionKernel, ...]]:
    """Returns the candidates with Transformer Engine's attention as the first choice, unless a flag asks for another
    kernel by name."""
    kernel = AttentionKernel(
        "Transformer Engine",
        EngineAttention(engine),
        lambda situation: situation.device_type in engine.device_types,
        _refusal,
        is_preference=True,
    )
    first = (AttnBackend.auto, AttnBackend.fused)
    return {asked: (kernel, *others) if asked in first else others for asked, others in candidates.items()}


def _refusal(variant: AttentionVariant, situation: Situation) -> str | None:
    if situation.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in half precision, not in {value_text(situation.dtype)}"
    if torch.are_deterministic_algorithms_enabled() and os.environ.get(_MAY_VARY) != "0":
        return f"is repeatable only with {_MAY_VARY}=0 in the environment, and deterministic mode needs that"
    if situation.training and variant.dropout:
        return f"cannot draw the masks of attention dropout {variant.dropout}"
    if situation.packed and not variant.causal:
        return "computes packed documents here only with causal attention"
    others = (
        (variant.cap is not None, f"cannot cap scores (at {variant.cap})"),
        (variant.slopes is not None, "is not used with ALiBi"),
        (variant.sink, "is not used with a softmax sink"),
        (variant.chunk is not None, "has no chunked attention"),
        (variant.adds_bias, "is not used with a bias of scores"),
        (variant.padded, "is not used with masks of padding"),
    )
    return next((reason for holds, reason in others if holds), None)


class EngineAttention:
    """Computes `unfused.attention` for the variants that are not refused."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._module = functools.cache(self._build)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, call: AttentionCall
    ) -> Tensor:
        """Returns softmax(scale q k^T) v: query [sq, b, a, d], key [sk, b, g, d], value [sk, b, g, dv] -> [sq, b, a,
        dv]. A call with a mask, with positions of queries, or with fewer queries than keys is computed by torch."""
        if call.mask is not None or call.query_positions is not None or query.shape[0] != key.shape[0]:
            other = attention if call.cu_seqlens is not None or not query.is_cuda else sdpa_attention_cuda
            return other(query, key, value, variant, call)
        s, b, a, _ = query.shape
        module = self._module(a, key.shape[2], query.shape[3], value.shape[3], variant)
        if call.cu_seqlens is None:
            output = module(query, key, value, qkv_format="sbhd", attn_mask_type=_mask_type(variant, packed=False))
            return output.view(s, b, a, value.shape[3])
        edges, longest = call.cu_seqlens.to(torch.int32), call.max_seqlen
        output = module(
            *(heads.squeeze(1) for heads in (query, key, value)),
            qkv_format="thd",
            attn_mask_type=_mask_type(variant, packed=True),
            cu_seqlens_q=edges,
            cu_seqlens_kv=edges,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return output.view(s, b, a, value.shape[3])

    def _build(self, heads: int, groups: int, width: int, value_width: int, variant: AttentionVariant) -> Any:
        return self.engine.pytorch.DotProductAttention(
            heads,
            width if width == value_width else (width, value_width),
            num_gqa_groups=groups,
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type=_mask_type(variant, packed=False),
            window_size=_window(variant),
            softmax_scale=variant.scale,
        )


def _window(variant: AttentionVariant) -> tuple[int, int] | None:
    if variant.window is None:
        return None
    left, right = (-1 if edge is None else edge for edge in variant.reach)
    return left, right


def _mask_type(variant: AttentionVariant, packed: bool) -> str:
    name = "causal" if variant.causal else "no_mask"
    return f"padding_{name}" if packed else name
