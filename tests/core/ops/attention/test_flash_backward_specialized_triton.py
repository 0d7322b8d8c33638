"""The backward of flash attention with specialised warps. Triton's interpreter does not run it:
tests/gpu/test_attention_on_gpu.py compares it with its definition, and tests/core/ops/test_compiled_kernels.py compiles
it."""

import pytest
import torch
from torch import Tensor

from megatron.core.ops.attention import flash_backward_specialized_triton
from megatron.core.ops.attention.flash_backward_specialized_triton import _round_kernel


def as_threads_hold(block: Tensor) -> Tensor:
    """Returns the numbers of a block [64, 64] in the order in which the warps write them (Hopper's layout of the
    results of matrix products, PTX ISA, wgmma)."""
    order = []
    for register in range(8):  # of four neighbours
        for thread in range(128):
            for more_rows in (0, 8):
                row = thread // 32 * 16 + thread % 32 // 4 + more_rows
                order += [row * 64 + register * 8 + thread % 4 * 2 + column for column in (0, 1)]
    return block.flatten()[torch.tensor(order)]


@pytest.mark.parametrize("width", [64, 128])
def test_sums_that_threads_hold_return_to_their_rows(width: int) -> None:
    queries, size, scale = 100, 128, 0.5
    sums = torch.randn(2, size, width, generator=torch.Generator().manual_seed(0))
    parts = [
        as_threads_hold(sums[pair, block * 64 : block * 64 + 64, part * 64 : part * 64 + 64])
        for pair in range(2)
        for block in range(2)
        for part in range(width // 64)
    ]
    found = torch.full((queries, 1, 2, width), torch.nan)
    _round_kernel[(2, 2)](found, torch.cat(parts), queries, 2, 2 * width // 64, scale, *found.stride()[:3], WIDTH=width)
    assert torch.equal(found[:, 0].transpose(0, 1), sums[:, :queries] * scale)


def test_tiles_begin_at_multiples_of_16_bytes() -> None:
    whole = torch.randn(40, 1, 2, 65)[..., 1:].bfloat16()
    odd = torch.randn(40, 1, 2, 65).bfloat16()[..., 1:]
    for given in (whole, odd):
        tiles = flash_backward_specialized_triton._copied(given, 64)
        assert tiles.base.data_ptr() % 16 == 0 and torch.equal(tiles.base, given.permute(1, 2, 0, 3))
