"""The kernel for weight gradients with specialised warps; tests/core/ops/test_compiled_kernels.py compiles it, and
tests/gpu/test_experts_on_gpu.py compares its values."""

import torch

from megatron.core.ops.moe.grouped_accumulate_triton import Specialization, takes
from megatron.core.ops.moe.grouped_linear_triton import ACCUMULATIONS

MOST_SHARED = 227 * 1024


def shared_bytes(sizes: Specialization) -> int:
    factors = sizes.stages * sizes.rows * 2 * (128 + 256)
    return factors + 2 * sizes.buffers * 64 * sizes.piece * 4


def test_each_specialization_fits_into_shared_memory() -> None:
    found = [way.specialized for way in ACCUMULATIONS.values() if way.specialized is not None]
    assert found
    for sizes in found:
        assert shared_bytes(sizes) + 1024 <= MOST_SHARED, sizes


def test_takes_no_tensors_of_the_cpu() -> None:
    rows = torch.zeros(64, 128, dtype=torch.bfloat16)
    assert not takes(torch.zeros(2, 128, 128), rows, rows)
