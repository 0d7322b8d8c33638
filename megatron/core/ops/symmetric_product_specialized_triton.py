"""Symmetric products of batches of matrices in float16, on Hopper GPUs, by warps with different tasks.

One program runs on each multiprocessor and computes tiles of 128 x 128 outputs, one after the other: those of the lower
triangles. Its warps have two tasks:

- One warp loads. It copies blocks of 64 channels of both factors into a ring of stages, for one tile after the other.
- Two warp groups of four warps compute every second tile each, and keep its sums in registers. While one multiplies,
  the other stores the tile before. Pieces of 64 x 64 below the diagonal are stored twice, the second time transposed.
  Those on the diagonal are made symmetric.

Barriers `full` and `empty` of each stage order the tasks (`ops.gluon_ring`), and `turn` of each warp group lets it
multiply. Without turns a warp group could wait for a phase of `full` that has the same number as an earlier one. It is
written in Gluon, Triton's language with explicit layouts and barriers. Triton's interpreter does not run it.
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

TILE, PIECE = gl.constexpr(128), gl.constexpr(64)
"""Rows and columns of a tile, and of the pieces in which it is stored."""
CHANNELS, STAGES = gl.constexpr(64), gl.constexpr(5)
"""Channels of a stage, and stages of the ring. Each takes 32 KiB of shared memory."""
BUFFERS = gl.constexpr(2)
"""Pieces of a warp group that the copy engine stores at the same time. Each takes 16 KiB of shared memory."""


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
            if TRANSPOSED:
                channel = (matrix * blocks + block) * CHANNELS
                load_bulk(left_tiles, [channel, row * TILE], full.index(stage), a.index(stage))
                load_bulk(right_tiles, [channel, column * TILE], full.index(stage), b.index(stage))
            else:
                channel = block * CHANNELS
                load_bulk(left_tiles, [matrix * size + row * TILE, channel], full.index(stage), a.index(stage))
                load_bulk(right_tiles, [matrix * size + column * TILE, channel], full.index(stage), b.index(stage))
            count += 1


@gluon.jit
def _store(  # type: ignore[no-untyped-def]
    output_tiles, value, added, row, column, base, size, alpha, beta, gamma, staging,
    ADDS: gl.constexpr, AT: gl.constexpr,
):  # fmt: skip
    """Stores a piece of sums, and below the diagonal its mirror image. Pieces above the diagonal are not stored."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PIECE, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if row >= column:
        total = gl.convert_layout(value, SUMS) * alpha
        if ADDS:
            lines = row + gl.arange(0, PIECE, gl.SliceLayout(1, SUMS))
            columns = column + gl.arange(0, PIECE, gl.SliceLayout(0, SUMS))
            at = (base + lines).to(gl.int64)[:, None] * size + columns[None, :]
            total += beta * gl.load(added + at).to(gl.float32)
            total += gl.where(lines[:, None] == columns[None, :], gamma, 0.0)
        rounded = total.to(output_tiles.dtype)
        part, mirror = staging.index(AT), staging.index(AT + 1)
        tma.store_wait(1)  # of the piece before, which has other buffers: it is stored once or twice
        part.store(rounded)
        mirror.permute((1, 0)).store(rounded)
        fence_async_shared()
        if row > column:
            store_bulk(output_tiles, [base + row, column], part)
            store_bulk(output_tiles, [base + column, row], mirror)
        else:
            own = gl.arange(0, PIECE, gl.SliceLayout(1, LINES))[:, None]
            below = own >= gl.arange(0, PIECE, gl.SliceLayout(0, LINES))[None, :]
            joined = gl.where(below, part.load(LINES), mirror.load(LINES))
            part.store(joined)
            fence_async_shared()
            store_bulk(output_tiles, [base + row, column], part)
    else:
        tma.store_wait(0)  # the next piece has the same buffers as the last one


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    output_tiles, added, a, b, staging, full, empty, turn, tiles, across, size, blocks, alpha, beta, gamma,
    TRANSPOSED: gl.constexpr, ADDS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Computes every second tile of this program, from the first (WHICH is 0) or the second on."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    OWN: gl.constexpr = WHICH * 2 * BUFFERS
    for tile in range(gl.program_id(0) + WHICH * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        matrix, row, column = _place(tile, across)
        total = gl.zeros([TILE, TILE], gl.float32, SUMS)
        before = tile // gl.num_programs(0)  # tiles of this program
        count = before * blocks
        mbarrier.wait(turn.index(WHICH), before // 2 & 1 ^ 1 ^ WHICH)
        for block in range(blocks):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            left, right = a.index(stage), b.index(stage)
            if TRANSPOSED:
                left = left.permute((1, 0))
            else:
                right = right.permute((1, 0))
            total = warpgroup_mma(left, right, total, is_async=True)
            # One product may still run, this one. The one before is done, so its stage is released.
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=block > 0)
            count += 1
        mbarrier.arrive(turn.index(1 - WHICH), count=1)
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        base, row, column = matrix * size, row * TILE, column * TILE
        upper, lower = total.reshape([2, PIECE, TILE]).permute((1, 2, 0)).split()
        one, two = upper.reshape([PIECE, 2, PIECE]).permute((0, 2, 1)).split()
        three, four = lower.reshape([PIECE, 2, PIECE]).permute((0, 2, 1)).split()
        _store(output_tiles, one, added, row, column, base, size, alpha, beta, gamma, staging, ADDS, OWN)
        _store(output_tiles, two, added, row, column + PIECE, base, size, alpha, beta, gamma, staging, ADDS, OWN + 2)
        row += PIECE
        _store(output_tiles, three, added, row, column, base, size, alpha, beta, gamma, staging, ADDS, OWN)
        _store(output_tiles, four, added, row, column + PIECE, base, size, alpha, beta, gamma, staging, ADDS, OWN + 2)
    tma.store_wait(0)


@gluon.jit
def _symmetric_product_specialized_kernel(  # type: ignore[no-untyped-def]
    output_tiles, left_tiles, right_tiles, added, tiles, across, size, blocks, alpha, beta, gamma,
    TRANSPOSED: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    shape: gl.constexpr = [STAGES, CHANNELS, TILE] if TRANSPOSED else [STAGES, TILE, CHANNELS]
    a = gl.allocate_shared_memory(left_tiles.dtype, shape, left_tiles.layout)
    b = gl.allocate_shared_memory(left_tiles.dtype, shape, right_tiles.layout)
    staging = gl.allocate_shared_memory(output_tiles.dtype, [4 * BUFFERS, PIECE, PIECE], output_tiles.layout)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for which in gl.static_range(2):
        mbarrier.init(turn.index(which), count=1)
    full, empty = ring_barriers(STAGES, 1)
    gl.warp_specialize(
        [
            (_multiply, (output_tiles, added, a, b, staging, full, empty, turn, tiles, across, size, blocks,
             alpha, beta, gamma, TRANSPOSED, ADDS, 0)),
            (_multiply, (output_tiles, added, a, b, staging, full, empty, turn, tiles, across, size, blocks,
             alpha, beta, gamma, TRANSPOSED, ADDS, 1)),
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
    output: Tensor, left: Tensor, right: Tensor, alpha: float, added: Tensor | None, beta: float, gamma: float
) -> None:
    """Computes `symmetric_product_triton` of factors that `takes` accepts into `output`."""
    n, size, inner = left.shape
    transposed = not left.is_contiguous()
    left, right = (one.mT if transposed else one for one in (left, right))
    block = (CHANNELS.value, TILE.value) if transposed else (TILE.value, CHANNELS.value)
    across = size // TILE.value
    tiles = n * across * (across + 1) // 2
    _symmetric_product_specialized_kernel[(min(tiles, num_multiprocessors(left.device)),)](
        _tiles(output), _tiles(left, *block), _tiles(right, *block), output if added is None else added,
        tiles, across, size, inner // CHANNELS.value, alpha, beta, gamma,
        TRANSPOSED=transposed, ADDS=added is not None, num_warps=4,
    )  # fmt: skip


def _tiles(values: Tensor, down: int = PIECE.value, across: int = PIECE.value) -> TensorDescriptor:
    """Returns matrices [n, r, c] of 16-bit elements as one of n r rows, in tiles, swizzled in shared memory."""
    flat = values.reshape(-1, values.shape[-1])
    return TensorDescriptor.from_tensor(flat, [down, across], gl.NVMMASharedLayout(128, 16, 2))
