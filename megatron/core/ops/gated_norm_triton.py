"""RMSNorm with a gate on a GPU: one kernel in forward and one in backward, which read the gate inside a packed
projection.

Backward keeps nothing but the inputs. Each of its programs sums its rows' part of the weight's gradient in registers
and writes it once; a second kernel sums these parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ops.causal_conv_triton import aligned
from megatron.core.ops.gated_norm import gated_rms_norm
from megatron.core.ops.split_columns import new_gradient_of
from megatron.core.ops.sum_rows_triton import num_multiprocessors, sum_rows_triton
from megatron.core.ops.tiles import cdiv, common_alignment, next_power_of_2
from megatron.core.utils.autograd_context import AutogradContext

_WIDEST = 16384
"""Channels of a row that fit into one program's registers."""
_PROGRAMS = 8
"""Programs of backward for each multiprocessor."""


@triton.jit
def _at(base, row, batch, per_group, group, s, b, g, r, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where rows of a group begin: [s, b, r] in this order."""
    token = row // per_group
    return (
        base
        + (token // batch) * s
        + (token % batch) * b
        + group.to(tl.int64) * aligned(g, ALIGNED)
        + (row % per_group) * r
    )


@triton.jit
def _gated_norm_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    output, inputs, gate, weight, rows, batch, groups, per_group, width, epsilon,
    inputs_s, inputs_b, inputs_g, inputs_r, gate_s, gate_b, gate_g, gate_r, weight_g,
    GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    valid = (row < rows)[:, None] & (column < width)[None, :]
    at = _at(inputs, row, batch, per_group, group, inputs_s, inputs_b, inputs_g, inputs_r, ALIGNED)
    x = tl.load(at[:, None] + column[None, :], mask=valid, other=0.0).to(tl.float32)
    at = _at(gate, row, batch, per_group, group, gate_s, gate_b, gate_g, gate_r, ALIGNED)
    z = tl.load(at[:, None] + column[None, :], mask=valid, other=0.0).to(tl.float32)
    factor = tl.load(weight + group * weight_g + column, mask=column < width, other=0.0).to(tl.float32)
    z *= tl.sigmoid(z)
    if GATE_FIRST:
        x *= z
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, 1) / width + epsilon))[:, None] * factor[None, :]
    if not GATE_FIRST:
        y *= z
    at = output + ((row // per_group * groups + group) * per_group + row % per_group) * width
    tl.store(at[:, None] + column[None, :], y.to(output.dtype.element_ty), mask=valid)


@triton.jit
def _gated_norm_backward_kernel(  # type: ignore[no-untyped-def]
    inputs_gradient, gate_gradient, weight_parts, gradient, inputs, gate, weight,
    rows, batch, groups, per_group, width, epsilon,
    gradient_s, gradient_b, gradient_g, gradient_r, inputs_s, inputs_b, inputs_g, inputs_r,
    gate_s, gate_b, gate_g, gate_r, target_s, target_b, target_g, target_r, weight_g,
    GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    group, column = tl.program_id(1), tl.arange(0, WIDTH)
    inside = column < width
    weight_part = tl.zeros((ROWS, WIDTH), tl.float32)
    factor = tl.load(weight + group * weight_g + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        valid = (row < rows)[:, None] & inside[None, :]
        at = _at(inputs, row, batch, per_group, group, inputs_s, inputs_b, inputs_g, inputs_r, ALIGNED)
        x = tl.load(at[:, None] + column[None, :], mask=valid, other=0.0).to(tl.float32)
        at = _at(gate, row, batch, per_group, group, gate_s, gate_b, gate_g, gate_r, ALIGNED)
        z = tl.load(at[:, None] + column[None, :], mask=valid, other=0.0).to(tl.float32)
        at = _at(gradient, row, batch, per_group, group, gradient_s, gradient_b, gradient_g, gradient_r, ALIGNED)
        dy = tl.load(at[:, None] + column[None, :], mask=valid, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(z)
        silu, slope = z * sigmoid, sigmoid * (1.0 + z * (1.0 - sigmoid))
        normed = x * silu if GATE_FIRST else x
        inverse = (1.0 / tl.sqrt(tl.sum(normed * normed, 1) / width + epsilon))[:, None]
        normed *= inverse
        # The gradient of the norm's result, and then of its input.
        dn = dy if GATE_FIRST else dy * silu
        weight_part += dn * normed
        dn *= factor
        dn = (dn - normed * (tl.sum(dn * normed, 1) / width)[:, None]) * inverse
        dx, dz = dn * silu if GATE_FIRST else dn, dn * x * slope if GATE_FIRST else dy * normed * factor * slope
        at = ((row // per_group * groups + group) * per_group + row % per_group) * width
        at = inputs_gradient + at[:, None] + column[None, :]
        tl.store(at, dx.to(inputs_gradient.dtype.element_ty), mask=valid)
        at = _at(gate_gradient, row, batch, per_group, group, target_s, target_b, target_g, target_r, ALIGNED)
        tl.store(at[:, None] + column[None, :], dz.to(gate_gradient.dtype.element_ty), mask=valid)
    at = weight_parts + (tl.program_id(0) * groups + group) * width + column
    tl.store(at, tl.sum(weight_part, 0), mask=inside)


def gated_rms_norm_triton(inputs: Tensor, gate: Tensor, weight: Tensor, epsilon: float, gate_first: bool) -> Tensor:
    """Computes `gated_norm.gated_rms_norm` in one kernel, with one rounding. Inputs and gate, whose last dimension is
    contiguous, are read as they lie. Float64 and rows of more than 16,384 channels use the reference."""
    types = inputs.dtype, gate.dtype, weight.dtype
    if torch.float64 in types or inputs.shape[-1] > _WIDEST or not inputs.numel():
        return gated_rms_norm(inputs, gate, weight, epsilon, gate_first)
    return _GatedNorm.apply(inputs, gate, weight, epsilon, gate_first)


class _GatedNorm(torch.autograd.Function):
    """With n = u / rms(u), the norm's gradient dn and g = dn w: du = (g - n mean(g n)) / rms(u), dw = sum over rows of
    dn n."""

    @staticmethod
    def forward(
        ctx: AutogradContext, inputs: Tensor, gate: Tensor, weight: Tensor, epsilon: float, gate_first: bool
    ) -> Tensor:
        ctx.save_for_backward(inputs, gate)
        # Keeps the parameter instead of a saved tensor; `ops.linear._Linear` says why.
        ctx.weight, ctx.epsilon, ctx.gate_first = weight, epsilon, gate_first
        ctx.new_gradient = new_gradient_of(gate)
        output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        x, z, (rows, *sizes), tile = _as_rows(inputs), _as_rows(gate), _sizes(inputs), _tile(inputs.shape[-1])
        _gated_norm_kernel[(cdiv(rows, tile["ROWS"]), sizes[1])](
            output, x, z, weight.detach().contiguous(), rows, *sizes, epsilon, *x.stride()[:4], *z.stride()[:4],
            _weight_stride(weight), GATE_FIRST=gate_first, ALIGNED=_aligned(x, z), **tile,
        )  # fmt: skip
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs, gate), weight = ctx.saved_tensors, ctx.weight.detach().contiguous()
        inputs_gradient = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
        gate_gradient = ctx.new_gradient()
        x, z, dy, dz = _as_rows(inputs), _as_rows(gate), _as_rows(output_gradient), _as_rows(gate_gradient)
        (rows, *sizes), tile = _sizes(inputs), _tile(inputs.shape[-1])
        groups, width = sizes[1], inputs.shape[-1]
        most = cdiv(_PROGRAMS * num_multiprocessors(x.device), groups)
        programs = max(1, min(cdiv(rows, tile["ROWS"]), most))
        parts = torch.empty(programs, groups, width, dtype=torch.float32, device=x.device)
        _gated_norm_backward_kernel[(programs, groups)](
            inputs_gradient, dz, parts, dy, x, z, weight, rows, *sizes, ctx.epsilon,
            *dy.stride()[:4], *x.stride()[:4], *z.stride()[:4], *dz.stride()[:4], _weight_stride(weight),
            GATE_FIRST=ctx.gate_first, ALIGNED=_aligned(x, z, dy, dz), **tile,
        )  # fmt: skip
        weight_gradient = None
        if ctx.needs_input_grad[2]:
            weight_gradient = sum_rows_triton(parts.view(-1, weight.numel()), weight.dtype).view(weight.shape)
        return inputs_gradient, gate_gradient, weight_gradient, None, None


def _as_rows(tensor: Tensor) -> Tensor:
    """Returns [s, b, g, r, n] whose last dimension is contiguous: a view, if the tensor allows it."""
    rows = tensor if tensor.dim() == 5 else tensor[:, :, :, None]
    return rows if rows.stride(4) == 1 else rows.contiguous()


def _sizes(inputs: Tensor) -> tuple[int, ...]:
    """Returns the rows of a group, and the sizes b, g, r and n."""
    length, batch, groups, *per_group, width = inputs.shape
    shared = per_group[0] if per_group else 1
    return length * batch * shared, batch, groups, shared, width


def _aligned(*strided: Tensor) -> int:
    return common_alignment(*(tensor.stride(2) for tensor in strided))


def _weight_stride(weight: Tensor) -> int:
    return weight.shape[1] if weight.dim() == 2 else 0


def _tile(width: int) -> dict[str, int]:
    """Returns the rows and channels of a program. A warp has whole rows if they are narrow, and sums them alone."""
    channels = next_power_of_2(width)
    return {"ROWS": max(1, 1024 // channels), "WIDTH": channels, "num_warps": max(1, min(16, channels // 1024))}
