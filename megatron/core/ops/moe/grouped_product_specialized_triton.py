"""Products of experts' rows with their weights in bf16, on Hopper GPUs, by warps with different tasks.

One program runs on each multiprocessor and computes tiles of 128 x 256 outputs, one after the other. Its warps have two
tasks:

- One warp loads. It takes the next tile from a counter in memory, finds the expert of its rows, and copies blocks of 64
  channels of rows and weights into a ring of stages. It does not wait for a tile to be finished before it loads for the
  next one.
- Two warp groups of four warps compute. Each has 64 rows of the tile and keeps their sums in registers. They are not in
  step: while one stores its part of a tile, the tensor cores multiply for the other.

Barriers `full` and `empty` of each stage order the tasks (`gluon_ring`).

The warp groups share the weights of a stage, because reads from the cache limit the tensor cores: a block takes 48 KiB
for 4.2 million operations, 85 for each byte. Warp groups with tiles of their own, 64 x 256 or 128 x 128, would have 51
or 64.

The copy engine stores parts of a tile whose rows all belong to one expert. The last tile of an expert may reach into
the next expert's rows, so its threads store the expert's rows only.

The order of the additions to a number does not depend on which program computes it, so results are the same at every
run. Nothing waits on the host, so CUDA graphs can capture the kernel. It is written in Gluon, Triton's language with
explicit layouts and barriers. Triton's interpreter does not run it.
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
from megatron.core.ops.gluon_ring import DONE, ask, place_in_band, ring_barriers, tell, tell_done
from megatron.core.ops.sum_rows_triton import num_multiprocessors
from megatron.core.ops.tiles import capability, cdiv, next_power_of_2

ROWS = gl.constexpr(64)
"""Rows of a warp group. A tile has those of two."""
COLUMNS = gl.constexpr(256)
"""Columns of a tile."""
CHANNELS, STAGES = gl.constexpr(64), gl.constexpr(4)
"""Channels of a stage, and stages of the ring. Each takes 48 KiB of shared memory."""
PIECE, BUFFERS = gl.constexpr(64), gl.constexpr(2)
"""Columns of a piece of a finished tile, and pieces of a warp group that the copy engine stores at the same time. Each
takes 8 KiB of shared memory. BUFFERS divides the pieces of a tile, because each tile starts at the first buffer."""
MOST_EXPERTS = 512
"""The loading warp has the tiles of all experts in its registers."""


@gluon.jit
def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon.jit
def _load_tiles(  # type: ignore[no-untyped-def]
    row_tiles, weight_tiles, begins, ends, counter, plan, a, b, full, empty, room, groups, across, blocks,
    step, TRANSPOSED: gl.constexpr, EXPERTS: gl.constexpr,
):  # fmt: skip
    expert = gl.arange(0, EXPERTS, gl.BlockedLayout([EXPERTS // 32], [32], [1], [0]))
    rows = gl.load(ends + expert, mask=expert < groups, other=0)
    rows = gl.minimum(rows, room) - gl.minimum(gl.load(begins + expert, mask=expert < groups, other=0), room)
    tiles_behind = gl.associative_scan((rows + (2 * ROWS - 1)) // (2 * ROWS), 0, _add)
    down = gl.max(tiles_behind, 0)
    count = 0
    tile = gl.program_id(0)
    while tile < down * across:
        following = gl.num_programs(0) + gl.atomic_add(counter, 1)
        row_tile, column_tile = place_in_band(tile, down, across)
        earlier = tiles_behind <= row_tile  # experts whose rows all come before this tile
        group = gl.sum(earlier.to(gl.int32), 0)
        first, end = gl.load(begins + group), gl.minimum(gl.load(ends + group), room)
        first += (row_tile - gl.max(gl.where(earlier, tiles_behind, 0), 0)) * (2 * ROWS)
        column = column_tile * COLUMNS
        for block in range(blocks):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), count // STAGES & 1 ^ 1)
            if block == 0:
                tell(plan, stage, first)
                tell(plan, STAGES + stage, end)
                tell(plan, 2 * STAGES + stage, column)
            mbarrier.expect(full.index(stage), (2 * ROWS + COLUMNS) * CHANNELS * 2)
            for which in gl.static_range(2):
                part = a.index(stage * 2 + which)
                load_bulk(row_tiles, [first + which * ROWS, block * CHANNELS], full.index(stage), part)
            if TRANSPOSED:
                at = [group * step + column, block * CHANNELS]
            else:
                at = [group * step + block * CHANNELS, column]
            load_bulk(weight_tiles, at, full.index(stage), b.index(stage))
            count += 1
        tile = following
    tell_done(plan, full, empty, count, STAGES)


@gluon.jit
def _store(  # type: ignore[no-untyped-def]
    tiles, output, value, row, end, column, width, staging, WHICH: gl.constexpr, PLACE: gl.constexpr
):
    """Stores columns of a tile, from column PLACE of the tile on, and not the rows from `end` on. Halves the columns
    until a piece fits into a buffer, and waits until the copy engine has read the buffer's piece before."""
    if value.shape[1] > PIECE:
        left, right = value.reshape([ROWS, 2, value.shape[1] // 2]).permute((0, 2, 1)).split()
        _store(tiles, output, left, row, end, column, width, staging, WHICH, PLACE)
        _store(tiles, output, right, row, end, column, width, staging, WHICH, PLACE + value.shape[1] // 2)
    else:
        part = staging.index(WHICH * BUFFERS + PLACE // PIECE % BUFFERS)
        if row + ROWS <= end:
            tma.store_wait(BUFFERS - 1)
            part.store(value)
            fence_async_shared()
            store_bulk(tiles, [row, column + PLACE], part)
        else:  # rows of the next expert follow
            LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            tma.store_wait(0)
            part.store(value)
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
            columns = column + PLACE + gl.arange(0, PIECE, gl.SliceLayout(0, LINES))
            at = output + rows.to(gl.int64)[:, None] * width + columns[None, :]
            gl.store(at, part.load(LINES), mask=(rows < end)[:, None] & (columns < width)[None, :])


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    output_tiles, output, plan, a, b, staging, full, empty, width, blocks,
    TRANSPOSED: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Computes the first (WHICH is 0) or the last ROWS rows of each tile."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    count = 0
    mbarrier.wait(full.index(0), 0)
    first = ask(plan, 0)
    while first != DONE:
        stage = count % STAGES
        row, end, column = first + WHICH * ROWS, ask(plan, STAGES + stage), ask(plan, 2 * STAGES + stage)
        if row < end:
            total = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
            for block in range(blocks):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), count // STAGES & 1)
                right = b.index(stage)
                if TRANSPOSED:
                    right = right.permute((1, 0))
                total = warpgroup_mma(a.index(stage * 2 + WHICH), right, total, is_async=True)
                # One product may still run, this one. The one before is done, so its stage is released.
                total = warpgroup_mma_wait(1, deps=[total])
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=block > 0)
                count += 1
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
            rounded = total.to(output_tiles.dtype)
            _store(output_tiles, output, rounded, row, end, column, width, staging, WHICH, 0)
        else:  # none of these rows belongs to the expert
            for _ in range(blocks):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), count // STAGES & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                count += 1
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        first = ask(plan, stage)
    tma.store_wait(0)


@gluon.jit
def _grouped_product_kernel(  # type: ignore[no-untyped-def]
    output_tiles, output, row_tiles, weight_tiles, begins, ends, counter, room, groups, across, width, blocks, step,
    TRANSPOSED: gl.constexpr, EXPERTS: gl.constexpr,
):  # fmt: skip
    b_shape: gl.constexpr = [STAGES, COLUMNS, CHANNELS] if TRANSPOSED else [STAGES, CHANNELS, COLUMNS]
    a = gl.allocate_shared_memory(row_tiles.dtype, [STAGES * 2, ROWS, CHANNELS], row_tiles.layout)
    b = gl.allocate_shared_memory(weight_tiles.dtype, b_shape, weight_tiles.layout)
    staging = gl.allocate_shared_memory(output_tiles.dtype, [2 * BUFFERS, ROWS, PIECE], output_tiles.layout)
    plan = gl.allocate_shared_memory(gl.int32, [3 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = ring_barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (_multiply, (output_tiles, output, plan, a, b, staging, full, empty, width, blocks, TRANSPOSED, 0)),
            (_multiply, (output_tiles, output, plan, a, b, staging, full, empty, width, blocks, TRANSPOSED, 1)),
            (_load_tiles, (row_tiles, weight_tiles, begins, ends, counter, plan, a, b, full, empty, room, groups,
             across, blocks, step, TRANSPOSED, EXPERTS)),
        ],
        [4, 1],  # warps of the second and the third task; the first runs on the program's own four
        [240, 24] if EXPERTS <= 256 else [232, 40],  # registers of their threads
    )  # fmt: skip


def takes(rows: Tensor, weight: Tensor) -> bool:
    """Returns whether the kernel can compute a product of bf16 on a GPU that `grouped_linear.is_one_product` accepts.

    It has instructions of capability 9.0 alone. A stage has whole blocks of channels, and the addresses of the copy
    engine divide by 16 bytes.
    """
    return (
        capability(rows.device) == (9, 0)
        and rows.dtype is weight.dtype
        and rows.shape[1] % CHANNELS.value == 0
        and weight.shape[0] <= MOST_EXPERTS
        and all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (rows, weight))
    )


def grouped_product_specialized(
    output: Tensor, rows: Tensor, weight: Tensor, bounds: tuple[Tensor, Tensor], transposed: bool
) -> None:
    """Computes `grouped_linear.grouped_product` of tensors that `takes` accepts into `output` [n, out], for the rows
    between the bounds of each group, two int32 [groups] that ascend. Other rows of the output stay as they are. Bounds
    behind the last row mean the last row."""
    number, channels = weight.shape[0], rows.shape[1]
    across = cdiv(output.shape[1], COLUMNS.value)
    most_tiles = across * (cdiv(rows.shape[0], 2 * ROWS.value) + number)
    block = (COLUMNS.value, CHANNELS.value) if transposed else (CHANNELS.value, COLUMNS.value)
    _grouped_product_kernel[(min(most_tiles, num_multiprocessors(rows.device)),)](
        _tiles(output, ROWS.value, PIECE.value), output, _tiles(rows, ROWS.value, CHANNELS.value),
        _tiles(weight.view(-1, weight.shape[2]), *block), *bounds,
        torch.zeros(1, dtype=torch.int32, device=rows.device), rows.shape[0], number, across, output.shape[1],
        channels // CHANNELS.value, weight.shape[1], TRANSPOSED=transposed, EXPERTS=max(32, next_power_of_2(number)),
        num_warps=4,
    )  # fmt: skip


def _tiles(values: Tensor, down: int, across: int) -> TensorDescriptor:
    """Returns a matrix of 16-bit elements in tiles, swizzled in shared memory."""
    return TensorDescriptor.from_tensor(values, [down, across], gl.NVMMASharedLayout(128, 16, 2))
