"""Compares memory-bound kernels with their definitions in float64: norms, rotary positions, biases, sums and
weight updates. Runs in Triton's interpreter or on a GPU."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.activation import Activation, gelu_erf, gelu_tanh, weighted_activation
from megatron.core.ops.attention.output_gate import gate_output
from megatron.core.ops.attention.output_gate_triton import gate_output_triton
from megatron.core.ops.dropout.dropout import bias_dropout_add
from megatron.core.ops.dropout.dropout_triton import bias_dropout_add_triton
from megatron.core.ops.embedding import accumulate_rows
from megatron.core.ops.embedding_triton import accumulate_rows_triton
from megatron.core.ops.moe.weighted_activation_triton import weighted_activation_triton
from megatron.core.ops.norm import layer_norm, layer_norm_with_residual, rms_norm, rms_norm_with_residual
from megatron.core.ops.norm_triton import (
    layer_norm_triton,
    layer_norm_with_residual_triton,
    rms_norm_triton,
    rms_norm_with_residual_triton,
)
from megatron.core.ops.normed_rope import normed_rope
from megatron.core.ops.normed_rope_triton import normed_rope_triton
from megatron.core.ops.rope import Rotation, apply_rope
from megatron.core.ops.rope_triton import apply_rope_triton
from megatron.core.ops.split_columns import split_columns
from megatron.core.ops.sum_rows_triton import sum_rows_triton
from megatron.core.optimizer import update_rules
from megatron.core.optimizer.adam_triton import adam_triton
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.segments import StateSegment, StepInputs
from megatron.core.optimizer.state_storage import Plain, StateTensor, WithRemainder, new_moment, split_float32
from megatron.core.optimizer.update_rules import Adam, update_segment

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNIT = {torch.float32: 2e-6, torch.float64: 1e-14, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""About one unit in the last place of each type. Triton's interpreter truncates to bfloat16 instead of rounding."""


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def agree(ours: Tensor | None, exact: Tensor | None, units: float, what: object) -> None:
    if ours is None or exact is None:
        assert ours is exact, what
        return
    assert ours.shape == exact.shape, what
    error, scale = (ours.double() - exact.double()).abs().max(), exact.double().abs().max()
    assert scale > 0 and error <= units * UNIT[ours.dtype] * scale, (what, ours.dtype, float(error / scale))


def results(function: Callable[..., Tensor], leaves: Sequence[Tensor | None], seed: int) -> list[Tensor | None]:
    """Returns output and gradients of a function of tensors."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in leaves]
    output = function(*leaves)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    output.backward(gradient.to(DEVICE, output.dtype))
    return [output.detach(), *(None if t is None else t.grad for t in leaves)]


def compare(
    definition: Callable[..., Tensor],
    kernel: Callable[..., Tensor],
    leaves: Sequence[Tensor | None],
    what: object,
    dtype: torch.dtype,
    units: float = 4.0,
) -> None:
    """Compares the kernel on these leaves with its definition on the same numbers in float64."""
    exact = results(definition, [None if t is None else t.double() for t in leaves], 9)
    ours = results(kernel, leaves, 9)
    assert ours[0] is not None and ours[0].dtype is dtype, what
    for number, (found, expected) in enumerate(zip(ours, exact, strict=True)):
        agree(found, expected, units, (what, number))


def norms() -> None:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    cases = (
        ((7, 65), f32, f32, True),
        ((3, 2, 300), bf16, bf16, False),
        ((2, 2500), f32, bf16, True),
        ((40, 8), f16, f16, False),
    )
    for shape, stream, weights, zero_centered in cases:
        x, (w, b) = values(*shape, dtype=stream) + 0.5, (values(shape[-1], dtype=weights, seed=n) for n in (1, 2))
        for leaves in ([x, w], [x, None], [x, w, b], [x, w, None], [x, None, None]):
            if leaves[1] is None and stream is not f32:
                continue
            definition, kernel = (rms_norm, rms_norm_triton) if len(leaves) == 2 else (layer_norm, layer_norm_triton)
            compare(
                lambda *given, f=definition, z=zero_centered: f(*given, 1e-3, z),
                lambda *given, f=kernel, z=zero_centered: f(*given, 1e-3, z),
                leaves,
                (definition.__name__, shape, [leaf is not None for leaf in leaves]),
                stream if leaves[1] is None else weights,
            )


def norms_of_views() -> None:
    """Checks norms of heads inside a packed projection, frozen weights, broadcast gradients, and empty inputs."""
    packed, w = values(5, 3, 6, 16), values(16, seed=1)
    for heads in (packed[:, :, 4], packed[:, :, 1:3], packed.transpose(0, 1)[..., 2, :]):
        compare(
            lambda x, w: rms_norm(x, w, 1e-3), lambda x, w: rms_norm_triton(x, w, 1e-3), [heads, w], "views", w.dtype
        )
    ours, exact = values(4, 16).requires_grad_(), values(4, 16).double().requires_grad_()
    rms_norm_triton(ours, w, 1e-3).sum().backward()
    rms_norm(exact, w.double(), 1e-3).sum().backward()
    agree(ours.grad, exact.grad, 4.0, "frozen weight")
    empty, w = values(0, 16).requires_grad_(), w.requires_grad_()
    rms_norm_triton(empty, w, 1e-3).sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 16) and w.grad is not None and not w.grad.any()


def norms_with_residual() -> None:
    """Checks norms whose backward adds the gradient of the residual, which may be strided or missing."""
    f32, bf16 = torch.float32, torch.bfloat16
    for shape, stream, weights, zero_centered in (
        ((7, 65), f32, f32, True),
        ((2, 2, 300), bf16, bf16, False),
        ((3, 40), f32, bf16, True),
    ):
        x, (w, b) = values(*shape, dtype=stream) + 0.5, (values(shape[-1], dtype=weights, seed=n) for n in (1, 2))
        for leaves in ([x, w], [x, w, b]):
            definition, kernel = rms_norm_with_residual, rms_norm_with_residual_triton
            if len(leaves) == 3:
                definition, kernel = layer_norm_with_residual, layer_norm_with_residual_triton
            given = partial(_joined, definition, zero_centered), partial(_joined, kernel, zero_centered)
            compare(*given, leaves, (definition.__name__, shape), weights)
    w = values(16, seed=1)
    for part in (0, 1, slice(2)):  # only one of the two results is used, or both
        ours, exact = values(4, 16).requires_grad_(), values(4, 16).double().requires_grad_()
        for x, weight, norm in ((ours, w, rms_norm_with_residual_triton), (exact, w.double(), rms_norm_with_residual)):
            used = norm(x, weight, 1e-3)[part]
            sum(tensor.sum() for tensor in (used if isinstance(used, tuple) else (used,))).backward()
        agree(ours.grad, exact.grad, 4.0, ("part", part))
    empty = values(0, 16).requires_grad_()
    sum(result.sum() for result in rms_norm_with_residual_triton(empty, w, 1e-3)).backward()
    assert empty.grad is not None and empty.grad.shape == (0, 16)


def _joined(norm: Callable[..., tuple[Tensor, Tensor]], zero_centered: bool, *leaves: Tensor | None) -> Tensor:
    """Returns normed tensor and residual side by side, in one type: the gradients of both are strided views."""
    normed, residual = norm(*leaves, 1e-3, zero_centered)
    return torch.cat((normed, residual.to(normed.dtype)), -1)


def positions() -> None:
    packed = values(5, 3, 2, 6, 16)
    views = [packed[..., 4, :], packed[..., :4, :], packed[:, :, 0, 1:].transpose(0, 1).contiguous().transpose(0, 1)]
    cases = ((False, 16, 0), (True, 16, 0), (False, 6, 0), (True, 6, 3), (False, 6, 3))
    for number, (interleaved, turned, first) in enumerate(cases):
        angle = values(5, 3 if number % 2 else 1, 1, turned // 2, seed=3)
        dtype = (torch.float32, torch.bfloat16)[number == 0]
        rotation = Rotation(angle.cos(), angle.sin(), interleaved, first)
        for heads in views if number < 2 else views[1:2]:
            compare(
                lambda x, r=rotation: apply_rope(x, r),
                lambda x, r=rotation: apply_rope_triton(x, r),
                [heads.to(dtype)],
                (interleaved, turned, first, tuple(heads.shape)),
                dtype,
            )


def normed_positions() -> None:
    """Checks norms of heads with rotation: heads inside a packed projection, several blocks of heads, channels that are
    not rotated, gradients with strides, and angles of each row."""
    packed = values(3, 2, 2, 6, 16) + 0.3
    cases = ((False, 16, 0, False, 16), (True, 12, 2, True, 16), (False, 6, 0, True, 10), (True, 16, 0, False, 16))
    for number, (interleaved, rotated, first, zero_centered, width) in enumerate(cases):
        angle = values(3, 2 if number % 2 else 1, 1, rotated // 2, seed=3)
        rotation = Rotation(angle.cos(), angle.sin(), interleaved, first)
        dtype, weights = ((torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.float32, torch.bfloat16))[number % 3]
        weight = values(width, dtype=weights, seed=4)
        for heads in (packed[..., 4, :width], packed[..., :4, :width]):
            compare(
                lambda x, w, z=zero_centered, r=rotation: normed_rope(x, w, 1e-3, z, r),
                lambda x, w, z=zero_centered, r=rotation: normed_rope_triton(x, w, 1e-3, z, r),
                [heads.to(dtype), weight],
                ("normed rope", number, tuple(heads.shape)),
                weights,
            )
    wide, rotation = values(2, 1, 70, 128), Rotation(torch.ones(2, 1, 1, 64), torch.zeros(2, 1, 1, 64))
    rotation = Rotation(rotation.cos.to(DEVICE), rotation.sin.to(DEVICE))
    found = []
    for function, kind in ((normed_rope, torch.float64), (normed_rope_triton, torch.float32)):
        leaf, weight = wide.to(kind).requires_grad_(), values(128, seed=1).to(kind).requires_grad_()
        output = function(leaf, weight, 1e-3, False, rotation)
        output.transpose(0, 2).backward(values(70, 1, 2, 128, seed=2).to(kind))  # a strided gradient
        found.append((output.detach(), leaf.grad, weight.grad))
    for ours, exact in zip(*reversed(found), strict=True):
        agree(ours, exact, 4.0, "normed rope of many heads")


def heads_of_a_projection() -> None:
    """Checks rotations and the gate of attention's output on parts of one projection: their kernels write into the
    packed gradient. Several blocks of columns; one group of heads, and several."""
    for groups, per_group, width, dtype in (
        (2, 2, 16, torch.float32),
        (1, 3, 700, torch.float32),
        (3, 1, 6, torch.bfloat16),
    ):
        queries = per_group * width
        packed, weight = values(3, 2, groups, 2 * queries + 2 * width, dtype=dtype), values(width, dtype=dtype, seed=1)
        angle = values(3, 1, 1, width // 2, seed=2)
        rotation, written = Rotation(angle.cos(), angle.sin()), {}

        def apply(rope: Any, normed: Any, gated: Any) -> Callable[..., Tensor]:
            def of_parts(packed: Tensor, weight: Tensor) -> Tensor:
                parts = split_columns(packed, (queries, queries, width, width))  # noqa: B023
                for name, part in zip(("query", "gate", "key", "value"), parts, strict=True):
                    part.register_hook(lambda gradient, name=name: written.update({name: gradient.stride()[1]}))  # noqa: B023
                query, gate, key, value = parts
                query = rope(query.unflatten(-1, (per_group, width)), rotation)  # noqa: B023
                key = normed(key, weight, 1e-3, False, rotation)  # noqa: B023
                context = gated(query.flatten(2) * value.mean(), gate)
                return torch.cat((context, key.flatten(2)), -1)

            return of_parts

        plain, kernels = (
            (apply_rope, normed_rope, gate_output),
            (apply_rope_triton, normed_rope_triton, gate_output_triton),
        )
        compare(apply(*plain), apply(*kernels), [packed, weight], ("projection", groups, width), dtype)
        assert written["query"] == written["gate"] == written["key"] == packed.stride(1) != written["value"]


def gated_outputs() -> None:
    """Checks the gate of attention's output with strided gradients, outputs and gates."""
    for shape, dtype in (((5, 2, 3, 70), torch.float32), ((3, 1, 2, 2100), torch.bfloat16)):
        s, b, g, c = shape
        context, gate = values(s, b, g * c + 1, dtype=dtype), values(s, b, g, c + 3, dtype=dtype, seed=1)
        compare(
            lambda context, gate: gate_output(context[..., 1:], gate[..., 1:-2]).flip(0),
            lambda context, gate: gate_output_triton(context[..., 1:], gate[..., 1:-2]).flip(0),
            [context, gate],
            ("gated outputs", shape),
            dtype,
        )


def sums() -> None:
    for shape, dtype, total in (
        ((5, 7), torch.float32, torch.float32),
        ((1100, 130), torch.bfloat16, torch.bfloat16),
        ((0, 3), torch.float32, torch.float32),
    ):
        rows = values(*shape, dtype=dtype) + 0.5
        found = sum_rows_triton(rows, total)
        assert found.dtype is total and found.shape == shape[1:]
        if shape[0]:
            agree(found, rows.double().sum(0), 4.0, ("sums", shape))
        else:
            assert not found.any()


def table_rows() -> None:
    """Checks sums of rows by index: an index within a part of 32 rows, over borders of parts, over more than 17 parts,
    all rows alike, single rows, none; and that each run gives the same bits."""
    for count, number, frequent, width, table_type, row_type in (
        (150, 50, 0.3, 70, torch.float32, torch.bfloat16),
        (200, 9, 0.8, 33, torch.float32, torch.float32),
        (580, 40, 1.0, 8, torch.float64, torch.float64),
        (600, 9, 0.95, 5, torch.float64, torch.float32),
        (64, 1000, 0.0, 16, torch.float32, torch.float32),
        (31, 4, 0.0, 600, torch.bfloat16, torch.bfloat16),
        (1, 3, 0.0, 4, torch.float32, torch.float32),
        (0, 3, 0.0, 4, torch.float32, torch.float32),
    ):
        generator = torch.Generator().manual_seed(count)
        index = torch.randint(number, (count,), generator=generator)
        index[torch.rand(count, generator=generator) < frequent] = number // 2
        index, rows = index.to(DEVICE), values(count, width, dtype=row_type)
        found = []
        for _ in range(2 if count == 200 else 1):
            found.append(values(number, width, dtype=table_type, seed=1))
            accumulate_rows_triton(found[-1], index, rows)
        exact = values(number, width, dtype=table_type, seed=1).double()
        accumulate_rows(exact, index, rows)
        agree(found[0], exact, 40.0 if table_type is not torch.bfloat16 else 2.0, ("rows of a table", count, number))
        assert torch.equal(found[0], found[-1])
    table = values(5, 4)
    accumulate_rows_triton(table, torch.tensor([3, 1, 3], device=DEVICE), values(4, 3, seed=2).t())
    exact = values(5, 4).double()
    accumulate_rows(exact, torch.tensor([3, 1, 3], device=DEVICE), values(4, 3, seed=2).t())
    agree(table, exact, 4.0, "rows that are not contiguous")


def biases() -> None:
    """Checks a bias before an activation and one before the residual, with their gradients."""
    clamped = Activation(F.silu, True, clamp=0.7, up_offset=1.0)
    for activation, rows, ffn, dtype in (
        (Activation(gelu_tanh), 33, 300, torch.bfloat16),
        (Activation(gelu_erf), 5, 9, torch.float32),
        (clamped, 19, 9, torch.float32),
    ):
        width = ffn * (2 if activation.gated else 1)
        compare(
            lambda x, b, a=activation: weighted_activation(x, b, None, a),
            lambda x, b, a=activation: weighted_activation_triton(x, b, None, a),
            [values(rows, width, dtype=dtype), values(width, dtype=dtype, seed=1)],
            (activation, rows),
            dtype,
        )
    for residual in (None, torch.float32, torch.bfloat16):
        leaves = [values(9, 300, dtype=torch.bfloat16), values(300, dtype=torch.bfloat16, seed=1)]
        leaves.append(None if residual is None else values(9, 300, dtype=residual, seed=2))
        compare(
            lambda *given: bias_dropout_add(*given, 0.0, None),
            lambda *given: bias_dropout_add_triton(*given, 0.0, None),
            leaves,
            ("bias and residual", residual),
            residual or torch.bfloat16,
        )


def updates() -> None:
    """Checks AdamW and Adam: rounding into the model's weights, decay as a number and on the device, skipped steps."""
    for decoupled, on_device, skip in (
        (True, False, False),
        (True, True, False),
        (False, True, True),
        (False, False, False),
    ):
        rule, wide = Adam(0.9, 0.999, 1e-8, decoupled), partial(torch.tensor, dtype=torch.float64, device=DEVICE)
        decay = wide(0.1) if on_device else 0.1
        step = StepInputs(torch.tensor(3.0, device=DEVICE), wide(1.7), torch.tensor(skip, device=DEVICE))
        held = [values(2100), values(2100, seed=1), values(2100, seed=2), values(2100, seed=3).abs()]
        before, exact = [t.clone() for t in held], [t.double() for t in held]
        rule.update(*exact[:2], exact[2:], step, wide(0.03), decay)
        copy = torch.zeros(2100, dtype=torch.bfloat16, device=DEVICE)
        for size in (2100, 0):
            w, g, m, v = (t[:size] for t in held)
            plain = {"exp_avg": Plain(m, torch.float32), "exp_avg_sq": Plain(v, torch.float32)}
            segment = StateSegment(Plain(w, torch.float32), g, plain, copy[:size], True)
            adam_triton(rule, segment, step, wide(0.03), decay, rounds_away=False)
        for number in (0, 2, 3):
            assert torch.equal(held[number], before[number]) == skip
            assert (held[number].double() - exact[number]).norm() < 2e-7 * exact[number].norm()
        if skip:
            assert not copy.any()
        else:
            agree(copy, exact[0], 1.0, "the model's weights")


def stored_updates() -> None:
    """Checks AdamW over state in 8 and 16 bits against the update in plain torch, with a remainder, with blocks that
    are not full, and with a skipped step."""
    f32, f16, bf16, fp8 = torch.float32, torch.float16, torch.bfloat16, torch.uint8
    wide = partial(torch.tensor, dtype=torch.float64, device=DEVICE)
    rule = Adam(0.9, 0.95, 1e-8, decoupled=True)
    for weights, first, second, skip in (
        ("remainder", bf16, f32, False),
        ("remainder", fp8, fp8, False),
        ("remainder", fp8, f16, True),
        ("float32", f16, f16, False),
        ("float16", f32, fp8, False),
    ):
        config = OptimizerConfig(use_precision_aware_optimizer=True, exp_avg_dtype=first, exp_avg_sq_dtype=second)
        step = StepInputs(torch.tensor(3.0, device=DEVICE), wide(1.7), torch.tensor(skip, device=DEVICE))
        gradient, held = values(2100, seed=1), []
        for _ in range(2):
            model, remainder = split_float32(values(2100))
            stored: StateTensor = WithRemainder(model, remainder)
            if weights == "float32":
                stored = Plain(values(2100), f32)
            if weights == "float16":
                half = OptimizerConfig(use_precision_aware_optimizer=True, exp_avg_dtype=f16)
                stored = new_moment("exp_avg", 2100, half, f32, DEVICE)
                stored.encode(values(2100))
            moments = [new_moment(name, 2100, config, f32, DEVICE) for name in rule.moments]
            for number, moment in enumerate(moments):
                moment.encode(values(2100, seed=2 + number).abs() * 1e-6)
            held.append((stored, *moments, model))
        (weight, m, v, model), (other_weight, other_m, other_v, other_model) = held
        ours_of, theirs_of = (
            StateSegment(own, gradient, {"exp_avg": first_moment, "exp_avg_sq": second_moment}, copy, True)
            for own, first_moment, second_moment, copy in held
        )
        adam_triton(rule, ours_of, step, wide(0.03), 0.1, rounds_away=True)
        with mock.patch.object(update_rules, "_adam_kernel", lambda: None):
            update_segment(rule, theirs_of, step, wide(0.03), 0.1, rounds_away=True)
        main = f16 if weights == "float16" else f32
        for ours, theirs, dtype in ((weight, other_weight, main), (m, other_m, first), (v, other_v, second)):
            got, expected = ours.decode(), theirs.decode()
            step_size = {f32: 2e-6, f16: 2e-3, bf16: 1e-2, fp8: 0.27}[dtype]  # of a square for the second moment
            worst = ((got - expected).abs() / expected.abs().clamp(min=expected.abs().max() * 1e-3)).max()
            assert worst <= step_size, (weights, first, second, float(worst))
        assert (model != other_model).sum() <= 2
