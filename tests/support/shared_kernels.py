"""Compares kernels beside shared experts with their definitions in float64, in Triton's interpreter or on a GPU."""

from collections.abc import Callable
from functools import partial

import torch
from support.elementwise_kernels import compare, values
from torch import Tensor

from megatron.core.ops.moe.shared import ReadInput, add_shared, read_input
from megatron.core.ops.moe.shared_triton import add_shared_triton, read_input_triton


def shared_outputs() -> None:
    """Checks the sum with and without gate and residual: rows that do not fill a program, wide and narrow ones, strided
    logits."""
    f32, bf16 = torch.float32, torch.bfloat16
    for rows, width, dtype in ((5, 3000, bf16), (67, 40, f32), (9, 64, bf16)):
        tensors = [values(rows, width, dtype=dtype, seed=seed) for seed in (0, 1, 2)]
        logits = values(rows, 3, dtype=dtype, seed=3)
        for gated, added_to in ((True, True), (True, False), (False, True), (False, False)):
            leaves = [*tensors[:2], logits if gated else None, tensors[2] if added_to else None]
            definition, kernel = (
                partial(_with_packed_logits, add_shared),
                partial(_with_packed_logits, add_shared_triton),
            )
            compare(definition, kernel, leaves, ("shared outputs", width, gated, added_to), dtype)


def _with_packed_logits(
    add: Callable[..., Tensor], routed: Tensor, shared: Tensor, logits: Tensor | None, residual: Tensor | None
) -> Tensor:
    return add(routed, shared, None if logits is None else logits[:, 1:2], residual)


def shared_inputs() -> None:
    """Checks the sum of the gradients of views and of a gate's logits, with strided ones, and views without a
    gradient."""
    f32, bf16 = torch.float32, torch.bfloat16
    for rows, width, dtype, gated, used in (
        (5, 3000, bf16, True, (0, 1, 2)),
        (67, 40, f32, False, (0, 1, 2)),
        (9, 64, bf16, True, (1,)),
        (9, 64, f32, False, (0, 2)),
        (9, 64, f32, False, (1,)),
        (9, 64, f32, True, ()),
    ):
        factors = [values(width, rows, dtype=dtype, seed=3 + number) for number in range(3)]

        def apply(read_input: Callable[..., ReadInput]) -> Callable[..., Tensor]:
            def used_views(hidden: Tensor, weight: Tensor | None) -> Tensor:
                read = read_input(hidden, weight)
                views = read.for_router, read.for_dispatch, read.for_shared
                parts = [(views[number] * factors[number].t().to(hidden.dtype)) for number in used]  # noqa: B023
                return torch.cat([*parts, *([] if read.gate_logits is None else [read.gate_logits])], 1)

            return used_views

        leaves = [values(rows, width, dtype=dtype), values(1, width, dtype=dtype, seed=1) if gated else None]
        compare(apply(read_input), apply(read_input_triton), leaves, ("shared inputs", rows, used), dtype)
