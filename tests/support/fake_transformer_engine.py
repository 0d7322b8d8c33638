"""Stands in for `transformer_engine.pytorch` and `transformer_engine.common.recipe` where there is no GPU.

Has the documented signatures of what we use and computes in torch. Checks what the real modules check or assume, and
notes the recipes of products. Quantises nothing, but with fp8 multiplies by the weight that it kept, as they do.
"""

import contextlib
import enum
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.ops.attention.unfused import AttentionCall, AttentionVariant, attention
from megatron.core.ops.transformer_engine.engine import Engine

used: list[Any] = []
"""For each product, its recipe; None: not in fp8."""
_recipes: list[Any] = []
exits = 0
"""How often an outermost `autocast` has ended: delayed scaling updates its scales then."""
_awaits_first = False
backward_updates = 0
"""How often the scales of gradients were updated, in the backward of the first product of an outermost `autocast`."""


def is_fp8_available(return_reason: bool = False) -> Any:
    return (True, "") if return_reason else True


is_fp8_block_scaling_available = is_fp8_available


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass(frozen=True)
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True


@dataclass(frozen=True)
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID


@dataclass(frozen=True)
class Float8BlockScaling:
    fp8_format: Format = Format.E4M3


@contextlib.contextmanager
def autocast(
    enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None
) -> Iterator[None]:
    global exits, _awaits_first
    _awaits_first = _awaits_first or not _recipes
    _recipes.append(recipe if enabled else None)
    try:
        yield
    finally:
        _recipes.pop()
        exits += not _recipes


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, values: Tensor, first: bool | None, fused: bool, updates: bool
    ) -> Tensor:
        ctx.save_for_backward(inputs, values)
        # The real modules keep a weak reference to the parameter object, too.
        ctx.weight, ctx.first, ctx.fused, ctx.updates = weakref.ref(weight), first, fused, updates
        return inputs @ values.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        global backward_updates
        backward_updates += ctx.updates
        inputs, values = ctx.saved_tensors
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = gradient.t() @ inputs
            if ctx.fused:
                weight = ctx.weight()
                assert weight is not None, "weight was removed"
                if ctx.first:
                    weight.main_grad.zero_()
                weight.main_grad.add_(weight_gradient)
                weight_gradient = None
        return gradient @ values, weight_gradient, None, None, None, None


class _Linears(nn.Module):
    def __init__(
        self, names: Sequence[str], sizes: tuple[int, int], dtype: torch.dtype, device: str, fused: bool
    ) -> None:
        super().__init__()
        self.names, self.fused = names, fused
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(sizes, dtype=dtype, device=device)))
        self.kept: dict[str, Tensor] = {}

    def product(self, inputs: Tensor, name: str, first: bool | None) -> Tensor:
        weight, recipe = getattr(self, name), _recipes[-1] if _recipes else None
        assert isinstance(weight, nn.Parameter) and not weight.is_meta and inputs.dtype is weight.dtype
        assert recipe is None or inputs.shape[0] % (128 if isinstance(recipe, Float8BlockScaling) else 8) == 0
        used.append(recipe)
        values = weight
        if recipe is not None and first is not None:
            if first:
                self.kept[name] = weight.detach().clone()
            values = self.kept[name]
        global _awaits_first
        updates = False
        if recipe is not None and torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad):
            updates, _awaits_first = _awaits_first, False
        return _Product.apply(inputs, weight, values.detach(), first, self.fused, updates)


class Linear(_Linears):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype = torch.float32,
        device: str = "cuda",
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        super().__init__(["weight"], (out_features, in_features), params_dtype, device, fuse_wgrad_accumulation)
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device))

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        assert inp.shape[0]
        output = self.product(inp, "weight", is_first_microbatch)
        return output if self.bias is None else output + self.bias


class GroupedLinear(_Linears):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype = torch.float32,
        device: str = "cuda",
        fuse_wgrad_accumulation: bool = False,
    ) -> None:
        names = [f"weight{number}" for number in range(num_gemms)]
        super().__init__(names, (out_features, in_features), params_dtype, device, fuse_wgrad_accumulation)
        assert not bias

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        assert isinstance(m_splits, list) and len(m_splits) == len(self.names) and sum(m_splits) == inp.shape[0]
        parts = zip(inp.split(m_splits), self.names, strict=True)
        return torch.cat([self.product(rows, name, is_first_microbatch) for rows, name in parts])


class Fp8Padding(nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.multiple = align_size or 16

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        parts = [F.pad(rows, (0, 0, 0, -rows.shape[0] % self.multiple)) for rows in inp.split(m_splits)]
        return torch.cat(parts), [part.shape[0] for part in parts]


class Fp8Unpadding(nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.multiple = align_size or 16

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        parts = inp.split([size + -size % self.multiple for size in m_splits])
        return torch.cat([part[:size] for part, size in zip(parts, m_splits, strict=True)])


class LayerNorm(nn.Module):
    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: str | None = None,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(normalized_shape, dtype=dtype, device=device))
        self._bias(normalized_shape, dtype, device)

    def _bias(self, *sizes: Any) -> None:
        self.bias = nn.Parameter(torch.empty(sizes[0], dtype=sizes[1], device=sizes[2]))

    def forward(self, inp: Tensor) -> Tensor:
        weight = self.weight + 1.0 if self.zero_centered else self.weight
        return F.layer_norm(inp, weight.shape, weight, self.bias, self.eps)


class RMSNorm(LayerNorm):
    def _bias(self, *sizes: Any) -> None:
        """Has none."""

    def forward(self, inp: Tensor) -> Tensor:
        weight = self.weight + 1.0 if self.zero_centered else self.weight
        return F.rms_norm(inp, weight.shape, weight, self.eps)


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.heads = num_attention_heads, num_gqa_groups
        self.scale, self.window = softmax_scale, window_size

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str = "sbhd",
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str = "causal",
    ) -> Tensor:
        packed = qkv_format == "thd"
        assert query_layer.dim() == (3 if packed else 4) and (query_layer.shape[-2], key_layer.shape[-2]) == self.heads
        assert attn_mask_type.startswith("padding") == packed == (cu_seqlens_q is not None)
        heads = [tensor[:, None] if packed else tensor for tensor in (query_layer, key_layer, value_layer)]
        variant = AttentionVariant(self.scale, "causal" in attn_mask_type, self.window)
        output = attention(*heads, variant, AttentionCall(cu_seqlens=cu_seqlens_q, max_seqlen=max_seqlen_q))
        return output.flatten(1) if packed else output.flatten(2)


FAKE = Engine(sys.modules[__name__], sys.modules[__name__], "fake", ("cpu",), (torch.float64,))
