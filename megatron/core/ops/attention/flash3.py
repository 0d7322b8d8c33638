"""FlashAttention-3 (Shah et al. 2024) on Hopper GPUs, where its package flash_attn_interface is installed."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.attention.blocks_cuda import FLASH_WIDTH_MULTIPLE
from megatron.core.ops.attention.sdpa import of_one_width, rows_end_to_end
from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant
from megatron.core.utils.warn import warn_on_first_rank

PACKAGE = "flash_attn_interface"


class Flash3Attention:
    """Computes `unfused.attention` in half precision, without dropout, soft cap, ALiBi, sink and padding."""

    def __init__(self, package: Any) -> None:
        self._rows: Callable[..., Any] = package.flash_attn_func
        self._documents: Callable[..., Any] = package.flash_attn_varlen_func

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, call: AttentionCall
    ) -> Tensor:
        """Returns softmax(scale q k^T) v: query [sq, b, a, d], key [sk, b, g, d], value [sk, b, g, dv] -> [sq, b, a,
        dv], for calls without mask and positions of queries."""
        assert call.mask is None and call.query_positions is None
        if call.cu_seqlens is not None and query.shape[1] > 1:
            return rows_end_to_end(self, query, key, value, variant, call)
        width, packed = value.shape[3], call.cu_seqlens is not None
        heads = of_one_width(query, key, value, FLASH_WIDTH_MULTIPLE)
        left, right = (-1 if edge is None else edge for edge in variant.reach)
        settings: dict[str, Any] = {
            "softmax_scale": variant.scale,
            "causal": variant.causal,
            "window_size": (left, right),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if packed:
            edges, longest = call.cu_seqlens, call.max_seqlen
            settings |= {"cu_seqlens_q": edges, "cu_seqlens_k": edges, "max_seqlen_q": longest, "max_seqlen_k": longest}
            found = self._documents(*(part.squeeze(1) for part in heads), **settings)  # [t, a, d]
        else:
            found = self._rows(*(part.transpose(0, 1) for part in heads), **settings)  # [b, sq, a, d]
        context: Tensor = found[0] if isinstance(found, tuple) else found  # older releases add the log-sum-exp
        return (context.unsqueeze(1) if packed else context.transpose(0, 1))[..., :width]


def find_flash3() -> Flash3Attention | None:
    """Returns FlashAttention-3; None if this GPU is no Hopper, or the package is missing. If it cannot be imported, a
    warning says why."""
    if not torch.cuda.is_available() or importlib.util.find_spec(PACKAGE) is None:
        return None
    return _import_flash3() if torch.cuda.get_device_capability()[0] == 9 else None


@functools.cache
def _import_flash3() -> Flash3Attention | None:
    try:
        return Flash3Attention(importlib.import_module(PACKAGE))
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warn_on_first_rank(f"--attention-backend flash: FlashAttention-3 cannot be imported ({reason})")
        return None
