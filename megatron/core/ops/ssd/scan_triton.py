"""The scan of a Mamba-2 layer on a GPU, as matrix products over chunks of tokens.

One kernel computes step sizes and decays, one the states before each chunk, and one the results. A program of the last
has a chunk and the heads of a group, one after the other, so C B^T is computed once for a group and the gradients of B
and C are sums in its registers. Backward keeps the inputs and the step sizes, and computes the states again.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.ssd.scan import mamba_scan
from megatron.core.ops.ssd.scan_backward_triton import scan_gradients
from megatron.core.ops.ssd.states_triton import Sizes, gradients_after_chunks, precision_of, states_before_chunks
from megatron.core.ops.ssd.steps_triton import gradients_of_steps, sizes_and_sums
from megatron.core.utils.autograd_context import AutogradContext
from megatron.core.utils.warn import warn_on_first_rank

_MOST_STATES = 256
"""Most numbers of B and C."""
_CHUNK = 64
"""Tokens of a chunk."""


@triton.jit
def _scan_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    output, mixed, states, sizes, sums, skip, document, length, groups, per_group, head_dim, state_dim, count,
    output_s, output_b, output_g, mixed_s, mixed_b, mixed_g, heads_of_program,
    PACKED: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, STATES: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    splits = per_group * PARTS // heads_of_program
    group, row, chunk = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(2), tl.program_id(1)
    first, t, p, n = chunk * CHUNK, tl.arange(0, CHUNK), tl.arange(0, WIDTH), tl.arange(0, STATES)
    token = first + t
    x_at = mixed + first.to(tl.int64) * mixed_s + row.to(tl.int64) * mixed_b + group * mixed_g
    y_at = output + first.to(tl.int64) * output_s + row.to(tl.int64) * output_b + group * output_g
    x_s, y_s = t[:, None] * mixed_s, t[:, None] * output_s
    here, there = (token < length)[:, None], (n < state_dim)[None, :]
    b_at = x_at + per_group * head_dim
    b = tl.load(b_at + x_s + n[None, :], mask=here & there, other=0.0)
    c = tl.load(b_at + state_dim + x_s + n[None, :], mask=here & there, other=0.0)
    products = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    pairs = t[:, None] >= t[None, :]
    from_before = t >= 0
    if PACKED:
        number = tl.load(document + token, mask=token < length, other=-1)
        pairs &= number[:, None] == tl.load(document + token, mask=token < length, other=-1)[None, :]
        from_before = number == tl.load(document + tl.maximum(first - 1, 0))
    start = tl.program_id(0) % splits * heads_of_program
    for inner in tl.range(start, start + heads_of_program, num_stages=STAGES):
        head = group * per_group + inner // PARTS
        channel = inner % PARTS * WIDTH + p
        at = inner // PARTS * head_dim
        inside = here & (channel < head_dim)[None, :]
        x = tl.load(x_at + at + x_s + channel[None, :], mask=inside, other=0.0)
        of_state = ((row * groups + group) * per_group * PARTS + inner) * count + chunk
        state = tl.load(states + of_state * (STATES * WIDTH) + n[:, None] * WIDTH + p[None, :])
        of_head = (row * groups * per_group + head) * count * CHUNK + first
        until, until_key = tl.load(sums + of_head + t), tl.load(sums + of_head + t)
        weight = tl.where(pairs, tl.exp2(until[:, None] - until_key[None, :]), 0.0)
        weight *= products * tl.load(sizes + of_head + t)[None, :]
        y = tl.dot(c, state.to(c.dtype), input_precision=PRECISION)
        y *= tl.where(from_before, tl.exp2(until), 0.0)[:, None]
        y = tl.dot(weight.to(x.dtype), x, y, input_precision=PRECISION)
        y += tl.load(skip + head).to(tl.float32) * x.to(tl.float32)
        tl.store(y_at + at + y_s + channel[None, :], y.to(output.dtype.element_ty), mask=inside)


def mamba_scan_triton(
    mixed: Tensor,
    step: Tensor,
    step_bias: Tensor,
    log_rate: Tensor,
    skip: Tensor,
    document: Tensor | None = None,
    *,
    head_dim: int,
    state_dim: int,
    min_step: float = 0.0,
    states_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes `scan.mamba_scan` for bfloat16; the result has this type. States pass on in float32; products read them
    in bfloat16, so `states_dtype` changes nothing. Other types, whose products would round more than plain torch, and
    more than 256 numbers of B and C use the reference."""
    if mixed.dtype is torch.bfloat16 and state_dim > _MOST_STATES:
        warn_on_first_rank(
            f"Mamba-2: kernels compute states of {_MOST_STATES} numbers at most, so plain torch computes those of "
            f"{state_dim}, which is slower"
        )
    if mixed.dtype is not torch.bfloat16 or state_dim > _MOST_STATES or not mixed.numel():
        sizes = {"head_dim": head_dim, "state_dim": state_dim, "min_step": min_step, "states_dtype": states_dtype}
        return mamba_scan(mixed, step, step_bias, log_rate, skip, document, **sizes)  # type: ignore[arg-type]
    return scan_in_kernels(mixed, step, step_bias, log_rate, skip, document, head_dim, state_dim, min_step)


def scan_in_kernels(*arguments: Any) -> Tensor:
    """Computes `mamba_scan` with kernels in any type but float64, which tests use to see more digits."""
    return _Scan.apply(*arguments)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        mixed: Tensor,
        step: Tensor,
        step_bias: Tensor,
        log_rate: Tensor,
        skip: Tensor,
        document: Tensor | None,
        head_dim: int,
        state_dim: int,
        min_step: float,
    ) -> Tensor:
        # Keeps the parameters instead of saved tensors; `ops.linear._Linear` says why.
        ctx.parameters, ctx.sizes = (step_bias, log_rate, skip), (head_dim, state_dim, min_step)
        x, dt = _last_contiguous(mixed), _last_contiguous(step)
        sizes = _sizes(x, head_dim, state_dim)
        steps, sums = sizes_and_sums(dt, step_bias, log_rate, min_step, sizes.chunk)
        ctx.save_for_backward(mixed, step, document, steps, sums)
        states = states_before_chunks(x, steps, sums, document, sizes, x.dtype)
        output = torch.empty(*x.shape[:3], x.shape[3] - 2 * state_dim, dtype=x.dtype, device=x.device)
        _launch(output, x, states, steps, sums, skip, document, sizes)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        mixed, step, document, steps, sums = ctx.saved_tensors
        head_dim, state_dim, min_step = ctx.sizes
        mixed, step, dy = _last_contiguous(mixed), _last_contiguous(step), _last_contiguous(output_gradient)
        sizes = _sizes(mixed, head_dim, state_dim)
        before = states_before_chunks(mixed, steps, sums, document, sizes, mixed.dtype)
        after, through = gradients_after_chunks(dy, mixed, before, sums, document, sizes)
        skip = ctx.parameters[2]
        of_mixed, scalars = scan_gradients(dy, mixed, before, after, steps, sums, skip, document, sizes)
        of_scalars = gradients_of_steps(scalars, through, step, ctx.parameters, min_step, sizes.chunk)
        return of_mixed, *of_scalars, None, None, None, None


def _launch(output: Tensor, mixed: Tensor, *tensors_and_sizes: Any) -> None:
    *tensors, sizes = tensors_and_sizes
    heads = math.gcd(_HEADS, sizes.per_group * sizes.parts)
    grid = (sizes.groups * sizes.per_group * sizes.parts // heads, sizes.count, sizes.batch)
    _scan_kernel[grid](
        output, mixed, *tensors, *sizes.for_kernel(), *output.stride()[:3], *mixed.stride()[:3], heads,
        PACKED=tensors[-1] is not None, **sizes.tiles(), STAGES=_STAGES, PRECISION=precision_of(mixed.dtype),
        num_warps=_WARPS,
    )  # fmt: skip


_HEADS = 8
"""Most heads of a program."""
_STAGES = 3
_WARPS = 4


def _sizes(mixed: Tensor, head_dim: int, state_dim: int) -> Sizes:
    length, batch, groups, width = mixed.shape
    return Sizes(length, batch, groups, (width - 2 * state_dim) // head_dim, head_dim, state_dim, _CHUNK)


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
