"""The gated delta rule of a layer on a GPU, in chunks of 64 tokens, forward and backward."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.delta_rule.attention import KEY_EPSILON, delta_rule_attention
from megatron.core.ops.delta_rule.chunk_factors_triton import CHUNK, FACTORS, _chunk_factors_kernel
from megatron.core.ops.delta_rule.gradients_triton import (
    _decay_gradients_kernel,
    _key_gradients_kernel,
    _pair_gradients_kernel,
    _query_gradients_kernel,
)
from megatron.core.ops.delta_rule.scans_triton import _state_gradients_kernel, _states_kernel
from megatron.core.ops.tiles import cdiv, next_power_of_2
from megatron.core.utils.autograd_context import AutogradContext

_WIDEST = 256
"""Most channels of a head. The state of a wider one does not fit beside the tiles of a program."""


def delta_rule_attention_triton(
    mixed: Tensor,
    fading: Tensor,
    strength: Tensor,
    log_rate: Tensor,
    bias: Tensor,
    widths: tuple[int, int],
    document: Tensor | None = None,
) -> Tensor:
    """Computes `attention.delta_rule_attention` with products of bfloat16 and sums in float32. Other types, and heads
    of more than 256 channels, use the definition. (Triton's interpreter computes in float32.)"""
    narrow = mixed.dtype is (torch.bfloat16 if mixed.is_cuda else torch.float32)
    if not narrow or not mixed.numel() or max(widths) > _WIDEST:
        return delta_rule_attention(mixed, fading, strength, log_rate, bias, widths, document)
    mixed = mixed if mixed.stride(-1) == 1 else mixed.contiguous()
    return _DeltaRule.apply(mixed, fading, strength, log_rate, bias, widths, document)


class _DeltaRule(torch.autograd.Function):
    """Backward keeps the inputs, and computes the factors, the states and the corrections again."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        mixed: Tensor,
        fading: Tensor,
        strength: Tensor,
        log_rate: Tensor,
        bias: Tensor,
        widths: tuple[int, int],
        document: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(mixed, fading, strength, document)
        # Keeps the parameters instead of saved tensors; `ops.linear._Linear` says why.
        ctx.log_rate, ctx.bias, ctx.widths = log_rate, bias, widths
        call = _Call(mixed, fading, strength, log_rate, bias, document, *widths)
        output = mixed.new_empty(*mixed.shape[:2], call.heads, call.value_width)
        _scan(call, _factors(call), output, mixed, mixed, keeps_states=False)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        mixed, fading, strength, document = ctx.saved_tensors
        call = _Call(mixed, fading, strength, ctx.log_rate.detach(), ctx.bias.detach(), document, *ctx.widths)
        gradient = output_gradient if output_gradient.stride(-1) == 1 else output_gradient.contiguous()
        factors = _factors(call)
        states = mixed.new_empty(call.rows, call.chunks, call.key_width, call.value_width)
        corrections = mixed.new_empty(call.rows, call.chunks, CHUNK, call.value_width)
        _scan(call, factors, mixed, states, corrections, keeps_states=True)
        mixed_gradient, states_gradient = mixed.new_empty(mixed.shape), torch.empty_like(states)
        _scan_back(call, factors, mixed_gradient, states_gradient, gradient)
        of_chunks = _Chunks(states, states_gradient, corrections, gradient)
        fading_gradient, strength_gradient, parts = _gradients(call, factors, of_chunks, mixed_gradient)
        of_rate, of_bias = parts.sum(0).unbind()
        of_rate, of_bias = of_rate.to(call.log_rate.dtype), of_bias.to(call.bias.dtype)
        return mixed_gradient, fading_gradient, strength_gradient, of_rate, of_bias, None, None


class _Call:
    """The arguments of `delta_rule_attention`, and what kernels need to know of them."""

    def __init__(
        self,
        mixed: Tensor,
        fading: Tensor,
        strength: Tensor,
        log_rate: Tensor,
        bias: Tensor,
        document: Tensor | None,
        key_width: int,
        value_width: int,
    ) -> None:
        self.mixed, self.log_rate, self.bias = mixed, log_rate, bias
        self.key_width, self.value_width, self.scale = key_width, value_width, key_width**-0.5
        self.length, self.batch, self.groups, self.shared = fading.shape
        self.heads, self.chunks = self.groups * self.shared, cdiv(self.length, CHUNK)
        self.rows = self.batch * self.heads
        self.of_mixed = mixed, *mixed.stride()[:3]
        self.fading, self.of_fading, self.of_strength = (
            fading,
            (fading, *fading.stride()),
            (strength, *strength.stride()),
        )
        self.of_decays = log_rate, bias, mixed if document is None else document
        self.has_documents = document is not None
        self.padded = _padded(key_width)
        """Channels of a key that products compute with."""

    def tile(self, values: int = 64, num_warps: int = 4, num_stages: int = 2, **settings: int) -> dict[str, int]:
        """Returns the settings of a kernel whose program computes `values` columns of states at once."""
        values, warps = min(values, _padded(self.value_width)), {"num_warps": num_warps, "num_stages": num_stages}
        return {"KEYS": self.padded, "VALUES": values, **warps, **settings}


@dataclass(frozen=True)
class _Factors:
    """What `chunk_factors_triton` computes of each chunk."""

    inverse: Tensor
    """T, [b g n, chunks, 64, 64]."""
    weights: Tensor
    """P, like T."""
    factors: Tensor
    """[b g n, chunks, 4, 64]."""
    through: Tensor
    """The decay through each chunk, [b g n, chunks]."""
    lengths: Tensor
    """1 / (|q| sqrt(dk)) and 1 / |k|, [b g, chunks, 2, 64]."""


@dataclass(frozen=True)
class _Chunks:
    states: Tensor
    """Before each chunk, [b g n, chunks, dk, dv]."""
    states_gradient: Tensor
    """Gradients of the states after each chunk."""
    corrections: Tensor
    """[b g n, chunks, 64, dv]."""
    output_gradient: Tensor
    """[s, b, g n, dv]."""


def _factors(call: _Call) -> _Factors:
    inverse = call.mixed.new_empty(call.rows, call.chunks, CHUNK, CHUNK)
    made = _Factors(
        inverse,
        torch.empty_like(inverse),
        _wide(call, call.rows, call.chunks, FACTORS, CHUNK),
        _wide(call, call.rows, call.chunks),
        _wide(call, call.batch * call.groups, call.chunks, 2, CHUNK),
    )
    _chunk_factors_kernel[(call.chunks, call.rows)](
        made.inverse, made.weights, made.factors, made.through, made.lengths,
        *call.of_mixed, *call.of_fading, *call.of_strength, *call.of_decays,
        call.length, call.heads, call.shared, call.key_width, call.scale, KEY_EPSILON,
        HAS_DOCUMENTS=call.has_documents, WIDTH=call.padded, num_warps=4,
    )  # fmt: skip
    return made


def _scan(
    call: _Call, factors: _Factors, output: Tensor, states: Tensor, corrections: Tensor, keeps_states: bool
) -> None:
    """Writes the outputs, or the states and the corrections; the other arguments are not read."""
    tile = call.tile(num_stages=3 if call.padded <= 128 else 2)
    _states_kernel[(cdiv(call.value_width, tile["VALUES"]), call.rows)](
        output, states, corrections, factors.inverse, factors.weights, factors.factors, factors.through,
        *call.of_mixed, call.length, call.chunks, call.heads, call.shared, call.batch, call.key_width,
        call.value_width, KEEPS_STATES=keeps_states, **tile,
    )  # fmt: skip


def _scan_back(
    call: _Call, factors: _Factors, mixed_gradient: Tensor, states_gradient: Tensor, gradient: Tensor
) -> None:
    """Writes the gradients of the states and, inside `mixed_gradient`, of the values."""
    tile = call.tile()
    _state_gradients_kernel[(cdiv(call.value_width, tile["VALUES"]), call.rows)](
        mixed_gradient, states_gradient, gradient, *gradient.stride()[:3],
        factors.inverse, factors.weights, factors.factors, factors.through,
        *call.of_mixed, *mixed_gradient.stride()[:3],
        call.length, call.chunks, call.heads, call.shared, call.key_width, call.value_width, **tile,
    )  # fmt: skip


def _gradients(
    call: _Call, factors: _Factors, chunks: _Chunks, mixed_gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `fading` and `strength`, and each chunk's part of those of `log_rate` and `bias`,
    [chunks b, 2, g n]. Writes those of queries and keys into `mixed_gradient`, which has those of the values."""
    fading_gradient, strength_gradient = (call.fading.new_empty(call.fading.shape) for _ in range(2))
    changes = _wide(call, 5, call.rows, call.chunks, CHUNK)
    of_gradient = mixed_gradient, *mixed_gradient.stride()[:3]
    of_output = chunks.output_gradient, *chunks.output_gradient.stride()[:3]
    sizes = call.groups, call.shared, call.key_width, call.value_width
    heads = call.chunks, call.batch * call.groups
    _pair_gradients_kernel[(call.chunks, call.rows)](
        factors.weights, factors.inverse, changes, strength_gradient, chunks.corrections, *of_gradient, *of_output,
        factors.lengths, *call.of_mixed, *call.of_fading, *call.of_strength, *call.of_decays,
        call.length, call.batch, *sizes, HAS_DOCUMENTS=call.has_documents, **call.tile(),
    )  # fmt: skip
    # With at most 128 registers two programs share a multiprocessor. The kernel of keys would spill too many.
    most = {"maxnreg": 128} if call.padded <= 128 and call.mixed.is_cuda else {}
    _query_gradients_kernel[heads](
        *of_gradient, changes, chunks.states, *of_output, factors.weights, factors.factors, factors.lengths,
        *call.of_mixed, call.length, *sizes, call.scale, **call.tile(num_warps=8, **most),
    )  # fmt: skip
    # With two stages, some results of wide heads differ from run to run (Triton 3.6).
    stages = 1 if call.padded > 128 else 2
    _key_gradients_kernel[heads](
        *of_gradient, changes, chunks.states, chunks.states_gradient, chunks.corrections,
        factors.weights, factors.inverse, factors.factors, factors.through, factors.lengths,
        *call.of_mixed, call.length, *sizes, **call.tile(num_warps=8, num_stages=stages),
    )  # fmt: skip
    parts = _wide(call, call.chunks * call.batch, 2, call.heads)
    _decay_gradients_kernel[(call.chunks, call.rows)](
        fading_gradient, parts, changes, *call.of_fading, *call.of_decays, call.length, call.batch, call.heads,
        call.shared, HAS_DOCUMENTS=call.has_documents, num_warps=1,
    )  # fmt: skip
    return fading_gradient, strength_gradient, parts


def _wide(call: _Call, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=call.mixed.device)


def _padded(width: int) -> int:
    """Returns the number of channels that products compute with."""
    return max(16, next_power_of_2(width))
