"""Symmetric products of batches of matrices in float16, on Hopper GPUs, by warps with different tasks.

One program runs on each multiprocessor and computes tiles of 128 x 128 outputs, one after the other: those of the lower
triangles. Its warps have two tasks:

- One warp loads. It copies blocks of 64 channels of both factors into a ring of stages, for one tile after the other.
- Two warp groups of four warps compute. Each has 64 rows of the tile and keeps their sums in registers. Pieces of 64 x
  64 below the diagonal are stored twice, the second time transposed. Those on the diagonal are made symmetric.

Barriers `full` and `empty` of each stage order the tasks (`ops.gluon_ring`). It is written in Gluon, Triton's language
with explicit layouts and barriers. Triton's interpreter does not run it.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megatron.core.ops.gluon_copies import load_bulk, store_bulk
from megatron.core.ops.gluon_ring import ring_barriers
from megatron.core.ops.sum_rows_triton import num_multiprocessors
from megatron.core.ops.tiles import capability

ROWS = gl.constexpr(64)
"""Rows of a warp group. A tile has those of two."""
TILE = gl.constexpr(128)
"""Rows and columns of a tile."""
CHANNELS, STAGES = gl.constexpr(64), gl.constexpr(5)
"""Channels of a stage, and stages of the ring. Each takes 32 KiB of shared memory."""
BUFFERS = gl.constexpr(2)
"""Pieces of a warp group that the copy engine stores at the same time. Each takes 8 KiB of shared memory."""


@gluon.jit
def _place(tile, across):  # type: ignore[no-untyped-def]
    """Returns matrix, row and column of a tile of the lower triangles. Row i of a triangle has i + 1 tiles."""
    each = across * (across + 1) // 2
    matrix, inside = tile // each, tile % each
    row = ((gl.sqrt(8.0 * inside.to(gl.float32) + 1.0) - 1.0) * 0.5).to(gl.int32)
    row = gl.where(row * (row + 1) // 2 > inside, row - 1, row)
    row = gl.where((row + 1) * (row + 2) // 2 <= inside, row + 1, row)
    return matrix, row, inside - row * (row + 1) // 2


@gluon.jit
def _load_tiles(  # type: ignore[no-untyped-def]
    left_tiles, right_tiles, a, b, full, empty, tiles, across, size, blocks, TRANSPOSED: gl.constexpr
):
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        matrix, row, column = _place(tile, across)
        for block in range(blocks):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), count // STAGES & 1 ^ 1)
            mbarrier.expect(full.index(stage), 2 * TILE * CHANNELS * 2)
            channel = block * CHANNELS
            if TRANSPOSED:
                channel += matrix * blocks * CHANNELS
                for which in gl.static_range(2):
                    part = a.index(stage * 2 + which)
                    load_bulk(left_tiles, [channel, row * TILE + which * ROWS], full.index(stage), part)
                load_bulk(right_tiles, [channel, column * TILE], full.index(stage), b.index(stage))
            else:
                for which in gl.static_range(2):
                    part = a.index(stage * 2 + which)
                    at = matrix * size + row * TILE + which * ROWS
                    load_bulk(left_tiles, [at, channel], full.index(stage), part)
                load_bulk(right_tiles, [matrix * size + column * TILE, channel], full.index(stage), b.index(stage))
            count += 1


@gluon.jit
def _store(output_tiles, value, row, column, base, staging, WHICH: gl.constexpr, FIRST: gl.constexpr):  # type: ignore[no-untyped-def]
    """Stores a piece [64, 64], and below the diagonal its mirror image. Pieces above the diagonal are not stored."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if row >= column:
        part, mirror = staging.index(WHICH * 2 * BUFFERS + FIRST), staging.index(WHICH * 2 * BUFFERS + FIRST + 1)
        tma.store_wait(1)  # of the piece before, which has other buffers and is stored once or twice
        part.store(value)
        mirror.permute((1, 0)).store(value)
        fence_async_shared()
        if row > column:
            store_bulk(output_tiles, [base + row, column], part)
            store_bulk(output_tiles, [base + column, row], mirror)
        else:
            lines, columns = gl.arange(0, 64, gl.SliceLayout(1, LINES)), gl.arange(0, 64, gl.SliceLayout(0, LINES))
            below = lines[:, None] >= columns[None, :]
            joined = gl.where(below, part.load(LINES), mirror.load(LINES))
            part.store(joined)
            fence_async_shared()
            store_bulk(output_tiles, [base + row, column], part)
    else:
        tma.store_wait(0)  # the next piece has the same buffers as the last one


@gluon.jit
def _store_both(output_tiles, values, row, column, base, staging, WHICH: gl.constexpr):  # type: ignore[no-untyped-def]
    """Stores the two pieces of [64, 128] values."""
    left, right = values.reshape([ROWS, 2, ROWS]).permute((0, 2, 1)).split()
    _store(output_tiles, left, row, column, base, staging, WHICH, 0)
    _store(output_tiles, right, row, column + ROWS, base, staging, WHICH, 2)


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    output_tiles, low_tiles, added, a, b, staging, full, empty, tiles, across, size, blocks, alpha, beta, gamma,
    TRANSPOSED: gl.constexpr, ADDS: gl.constexpr, LOW: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Computes the first (WHICH is 0) or the last ROWS rows of each tile."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        matrix, row, column = _place(tile, across)
        total = gl.zeros([ROWS, TILE], gl.float32, SUMS)
        for block in range(blocks):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            left, right = a.index(stage * 2 + WHICH), b.index(stage)
            if TRANSPOSED:
                left = left.permute((1, 0))
            else:
                right = right.permute((1, 0))
            total = warpgroup_mma(left, right, total, is_async=True)
            # One product may still run, this one. The one before is done, so its stage is released.
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=block > 0)
            count += 1
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        base, at = matrix * size, row * TILE + WHICH * ROWS
        total *= alpha
        if ADDS:
            lines = at + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
            columns = column * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SUMS))
            total += beta * gl.load(added + (base + lines).to(gl.int64)[:, None] * size + columns[None, :]).to(
                gl.float32
            )
            total += gl.where(lines[:, None] == columns[None, :], gamma, 0.0)
        rounded = total.to(output_tiles.dtype)
        _store_both(output_tiles, rounded, at, column * TILE, base, staging, WHICH)
        if LOW:
            rest = (total - rounded.to(gl.float32)).to(output_tiles.dtype)
            _store_both(low_tiles, rest, at, column * TILE, base, staging, WHICH)
    tma.store_wait(0)


@gluon.jit
def _symmetric_product_specialized_kernel(  # type: ignore[no-untyped-def]
    output_tiles, low_tiles, left_tiles, right_tiles, added, tiles, across, size, blocks, alpha, beta, gamma,
    TRANSPOSED: gl.constexpr, ADDS: gl.constexpr, LOW: gl.constexpr,
):  # fmt: skip
    a = gl.allocate_shared_memory(left_tiles.dtype, [STAGES * 2, ROWS, CHANNELS], left_tiles.layout)
    b_shape: gl.constexpr = [STAGES, CHANNELS, TILE] if TRANSPOSED else [STAGES, TILE, CHANNELS]
    b = gl.allocate_shared_memory(left_tiles.dtype, b_shape, right_tiles.layout)
    staging = gl.allocate_shared_memory(output_tiles.dtype, [4 * BUFFERS, ROWS, ROWS], output_tiles.layout)
    full, empty = ring_barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (_multiply, (output_tiles, low_tiles, added, a, b, staging, full, empty, tiles, across, size, blocks,
             alpha, beta, gamma, TRANSPOSED, ADDS, LOW, 0)),
            (_multiply, (output_tiles, low_tiles, added, a, b, staging, full, empty, tiles, across, size, blocks,
             alpha, beta, gamma, TRANSPOSED, ADDS, LOW, 1)),
            (_load_tiles, (left_tiles, right_tiles, a, b, full, empty, tiles, across, size, blocks, TRANSPOSED)),
        ],
        [4, 1],  # warps of the second and the third task; the first runs on the program's own four
        [240, 24],  # registers of their threads
    )  # fmt: skip


def takes(left: Tensor, right: Tensor) -> bool:
    """Returns whether the kernel can compute a product: with whole tiles and blocks, and both factors stored alike, by
    rows or by columns."""
    by_rows = left.is_contiguous() and right.is_contiguous()
    return (
        capability(left.device) == (9, 0)
        and left.dtype is right.dtype is torch.float16
        and (by_rows or (left.mT.is_contiguous() and right.mT.is_contiguous()))
        and left.shape[1] % TILE.value == 0
        and left.shape[2] % CHANNELS.value == 0
        and all(one.data_ptr() % 16 == 0 for one in (left, right))
    )


def symmetric_product_specialized(
    output: Tensor,
    low: Tensor | None,
    left: Tensor,
    right: Tensor,
    alpha: float,
    added: Tensor | None,
    beta: float,
    gamma: float,
) -> None:
    """Computes `symmetric_product_triton` of factors that `takes` accepts into `output` and `low`."""
    n, size, inner = left.shape
    transposed = not left.is_contiguous()
    left, right = (one.mT if transposed else one for one in (left, right))
    block = (CHANNELS.value, TILE.value) if transposed else (TILE.value, CHANNELS.value)
    across = size // TILE.value
    tiles = n * across * (across + 1) // 2
    _symmetric_product_specialized_kernel[(min(tiles, num_multiprocessors(left.device)),)](
        _tiles(output), _tiles(output if low is None else low), _tiles(left), _tiles(right, *block),
        output if added is None else added, tiles, across, size, inner // CHANNELS.value, alpha, beta, gamma,
        TRANSPOSED=transposed, ADDS=added is not None, LOW=low is not None, num_warps=4,
    )  # fmt: skip


def _tiles(values: Tensor, down: int = ROWS.value, across: int = ROWS.value) -> TensorDescriptor:
    """Returns matrices [n, r, c] of 16-bit elements as one of n r rows, in tiles, swizzled in shared memory."""
    flat = values.reshape(-1, values.shape[-1])
    return TensorDescriptor.from_tensor(flat, [down, across], gl.NVMMASharedLayout(128, 16, 2))
