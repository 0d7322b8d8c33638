"""Step sizes and decays of Mamba-2 on a GPU, forward and backward."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.sum_rows_triton import sum_rows_triton
from megatron.core.ops.tiles import cdiv, next_power_of_2

_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class ScalarGradients:
    """Gradients of step sizes and decays by the places in which they are, [b, heads * parts, s] in float32."""

    sizes: Tensor
    """Gradients of step sizes, without what comes through decays."""
    pairs: Tensor
    """Gradients of a token's decay (its natural logarithm), from pairs of tokens of its chunk before and after it."""
    reads: Tensor
    """Gradients of all decays of the chunk until a token, with which it reads the state before the chunk."""
    adds: Tensor
    """Gradients of all decays of the chunk after a token, with which it is added to the state after the chunk."""
    skip: Tensor
    """Gradients of D from each chunk: [b, chunks, heads * parts]."""


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)), as precise for a small result as for a large one."""
    small = tl.exp(-tl.abs(x))
    # log(1 + y) = y log(1 + y) / ((1 + y) - 1), for the y that 1 + y stands for.
    rounded = 1.0 + small
    difference = rounded - 1.0
    ratio = tl.where(difference == 0.0, 1.0, tl.log(rounded) / tl.where(difference == 0.0, 1.0, difference))
    return tl.maximum(x, 0.0) + small * ratio


@triton.jit
def _place(step, bias, length, heads, per_group, step_s, step_b, step_g, CHUNK: tl.constexpr, HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """dt + dt_bias [tokens, heads] of a chunk, with pointers' offsets and masks."""
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    valid = (token < length)[:, None] & (head < heads)[None, :]
    at = step + token.to(tl.int64)[:, None] * step_s + tl.program_id(2).to(tl.int64) * step_b
    at += (head // per_group * step_g + head % per_group)[None, :]
    x = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    return x + tl.load(bias + head, mask=head < heads, other=0.0).to(tl.float32)[None, :], token, head, valid


@triton.jit
def _steps_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    sizes, sums, step, bias, log_rate, length, padded, heads, per_group, step_s, step_b, step_g, min_step,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    x, token, head, valid = _place(step, bias, length, heads, per_group, step_s, step_b, step_g, CHUNK, HEADS)
    size = tl.where(valid, tl.maximum(_softplus(x), min_step), 0.0)
    rate = -tl.exp(tl.load(log_rate + head, mask=head < heads, other=0.0).to(tl.float32))
    at = (tl.program_id(2) * heads + head[None, :]).to(tl.int64) * padded + token[:, None]
    tl.store(sizes + at, size, mask=(head < heads)[None, :])
    tl.store(sums + at, tl.cumsum(size * (rate * _LOG2_E)[None, :], 0), mask=(head < heads)[None, :])


@triton.jit
def _steps_backward_kernel(  # type: ignore[no-untyped-def]
    step_gradient, parts, of_sizes, of_pairs, of_reads, of_adds, of_skip, of_through, step, bias, log_rate,
    length, batch, padded, heads, per_group, step_s, step_b, step_g, min_step,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    x, token, head, valid = _place(step, bias, length, heads, per_group, step_s, step_b, step_g, CHUNK, HEADS)
    of_size = tl.zeros((CHUNK, HEADS), tl.float32)
    of_decay = tl.zeros((CHUNK, HEADS), tl.float32)
    of_d = tl.zeros((HEADS,), tl.float32)
    row = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    for part in tl.static_range(PARTS):
        at = ((tl.program_id(2) * heads + head[None, :]) * PARTS + part).to(tl.int64) * padded + token[:, None]
        of_size += tl.load(of_sizes + at, mask=valid, other=0.0)
        of_decay += tl.load(of_pairs + at, mask=valid, other=0.0)
        of_decay += tl.cumsum(tl.load(of_reads + at, mask=valid, other=0.0), 0, reverse=True)
        added = tl.load(of_adds + at, mask=valid, other=0.0)
        of_decay += tl.cumsum(added, 0) - added
        at = ((tl.program_id(2) * heads + head) * PARTS + part) * tl.num_programs(0) + tl.program_id(0)
        of_d += tl.load(of_skip + (row * heads + head) * PARTS + part, mask=head < heads, other=0.0)
        for block in tl.static_range(BLOCKS):
            of_decay += tl.load(of_through + at * BLOCKS + block, mask=head < heads, other=0.0)[None, :]
    rate = -tl.exp(tl.load(log_rate + head, mask=head < heads, other=0.0).to(tl.float32))[None, :]
    size = _softplus(x)
    of_rate = of_decay * tl.maximum(size, min_step) * rate
    of_step = tl.where(size >= min_step, (of_size + of_decay * rate) * tl.sigmoid(x), 0.0)
    at = step_gradient + (token.to(tl.int64)[:, None] * batch + tl.program_id(2)) * heads + head[None, :]
    tl.store(at, of_step.to(step_gradient.dtype.element_ty), mask=valid)
    sums = parts + row * 3 * heads + head
    tl.store(sums, tl.sum(of_step, 0), mask=head < heads)
    tl.store(sums + heads, tl.sum(tl.where(valid, of_rate, 0.0), 0), mask=head < heads)
    tl.store(sums + 2 * heads, of_d, mask=head < heads)


def sizes_and_sums(step: Tensor, bias: Tensor, log_rate: Tensor, min_step: float, chunk: int) -> tuple[Tensor, Tensor]:
    """Returns the step sizes max(softplus(dt + dt_bias), min_step), and the sums of the decays' logarithms, to base 2,
    from the first token of a chunk until each token: both [b, h, s] in float32, with s filled up to whole chunks by
    steps of 0. dt [s, b, g, heads of a group]."""
    length, batch, groups, per_group = step.shape
    heads, count = groups * per_group, cdiv(length, chunk)
    sizes = torch.empty(batch, heads, count * chunk, dtype=torch.float32, device=step.device)
    sums, tile = torch.empty_like(sizes), _heads_of_a_program(heads)
    _steps_kernel[(count, cdiv(heads, tile), batch)](
        sizes, sums, step, bias, log_rate, length, count * chunk, heads, per_group, *step.stride()[:3], min_step,
        CHUNK=chunk, HEADS=tile,
    )  # fmt: skip
    return sizes, sums


def gradients_of_steps(
    gradients: ScalarGradients,
    of_through: Tensor,
    step: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor],
    min_step: float,
    chunk: int,
) -> tuple[Tensor, ...]:
    """Returns the gradients of dt, dt_bias, A_log and D. `of_through` [b, heads * parts, chunks, parts]: that of all
    decays of a chunk, from the states that pass through it. Parts are added up."""
    length, batch, groups, per_group = step.shape
    heads, count = groups * per_group, cdiv(length, chunk)
    bias, log_rate, _ = parameters
    tile = _heads_of_a_program(heads)
    step_gradient = torch.empty(step.shape, dtype=step.dtype, device=step.device)
    parts = torch.empty(batch * count, 3 * heads, dtype=torch.float32, device=step.device)
    _steps_backward_kernel[(count, cdiv(heads, tile), batch)](
        step_gradient, parts,
        gradients.sizes, gradients.pairs, gradients.reads, gradients.adds, gradients.skip, of_through,
        step, bias, log_rate, length, batch, count * chunk, heads, per_group, *step.stride()[:3], min_step,
        PARTS=of_through.shape[1] // heads, BLOCKS=of_through.shape[3], CHUNK=chunk, HEADS=tile,
    )  # fmt: skip
    dtype = bias.dtype if len({parameter.dtype for parameter in parameters}) == 1 else torch.float32
    sums = sum_rows_triton(parts, dtype).split(heads)
    return step_gradient, *(total.to(parameter.dtype) for total, parameter in zip(sums, parameters, strict=True))


def _heads_of_a_program(heads: int) -> int:
    return min(16, next_power_of_2(heads))
