"""Weight gradients of grouped products for Hopper (capability 9.0), with warps that only load and warps that compute.

A persistent program keeps one warp that loads tiles of factors for its next products while two warp groups still
compute or add the finished tile to the total, so tensor cores hardly wait between tiles. It is written in Gluon,
Triton's language with explicit layouts and barriers, which Triton's interpreter does not run.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megatron.core.ops.sum_rows_triton import num_multiprocessors

OUT_TILE, IN_TILE = 128, 256
"""Outputs and inputs of a program's tile; each of its two warp groups computes half of the outputs."""


@dataclass(frozen=True)
class Specialization:
    """Sizes of the kernel with specialised warps. Shared memory holds 768 bytes for each stage and row, and 512 for
    each column of a piece and buffer; at most 227 KiB in all."""

    rows: int = 64
    """Rows of a stage."""
    stages: int = 4
    """Tiles of factors that are loaded ahead."""
    piece: int = 32
    """Columns of the piece of a finished tile that a warp group adds at once."""
    buffers: int = 2
    """Pieces of a warp group that the copy engine adds at the same time. 0: threads add from their registers."""
    band: int = 8
    """Tile rows that neighbouring programs share, so that they find inputs in the cache."""
    takes_turns: bool = True
    """True: program p computes tiles p, p + programs, ... False: programs take the next tile when they are ready."""


@builtin
def _add_shared(descriptor, coordinates, source, _semantic=None):  # type: ignore[no-untyped-def]
    """Emits a bulk copy that adds shared memory to global memory."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)


# Names of later versions, and what Triton 3.6 has in their place.
_load_bulk = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_add_bulk = getattr(tma, "async_atomic_add", None) or _add_shared


@gluon.jit
def _place(tile, tiles_out, tiles_in, BAND: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns group, tile row and tile column. Orders tiles of a group in bands of BAND tile rows."""
    each = tiles_out * tiles_in
    inside = tile % each
    band = inside // (BAND * tiles_in)
    height = gl.minimum(tiles_out - band * BAND, BAND)
    inside = inside % (BAND * tiles_in)
    return tile // each, band * BAND + inside % height, inside // height


@gluon.jit
def _rows_of(ends, group):  # type: ignore[no-untyped-def]
    """Returns the first row of a group and the end of its rows."""
    return gl.load(ends + group - 1, mask=group > 0, other=0), gl.load(ends + group)


@gluon.jit
def _after(step, phase, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the next place in a ring of STAGES and the phase of its barriers."""
    wraps = step == STAGES - 1
    return gl.where(wraps, 0, step + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _load_tiles(  # type: ignore[no-untyped-def]
    left, right, ends, queue, ready, taken, next_tile, upper, lower, wide, full, empty, tiles, tiles_out, tiles_in,
    ROWS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Loads tiles of factors, stage by stage, when both warp groups have released the stage."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    step = 0
    phase = 1
    slot = 0
    slot_phase = 1
    tile = gl.program_id(0)
    while tile < tiles:
        if TURNS:
            following = tile + gl.num_programs(0)
        else:
            mbarrier.wait(taken.index(slot), slot_phase)
            queue.index(slot).store(gl.full([1], tile, gl.int32, ONE))
            mbarrier.arrive(ready.index(slot), count=1)
            slot, slot_phase = _after(slot, slot_phase, 2)
            following = gl.atomic_add(next_tile, 1, sem="relaxed") + gl.num_programs(0)
        group, o, i = _place(tile, tiles_out, tiles_in, BAND)
        start, end = _rows_of(ends, group)
        for row in range(start, end, ROWS):
            mbarrier.wait(empty.index(step), phase)
            barrier = full.index(step)
            mbarrier.expect(barrier, ROWS * 768)
            _load_bulk(left, [row, o * 128], barrier, upper.index(step))
            _load_bulk(right, [row, i * 256], barrier, wide.index(step))
            _load_bulk(left, [row, o * 128 + 64], barrier, lower.index(step))
            step, phase = _after(step, phase, STAGES)
        tile = following
    if not TURNS:  # says that there are no more tiles
        mbarrier.wait(taken.index(slot), slot_phase)
        queue.index(slot).store(gl.full([1], tile, gl.int32, ONE))
        mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def _blank(buffer, rows, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sets the rows of a buffer from number `rows` on to zero."""
    value = buffer.load(LAYOUT)
    row = gl.arange(0, buffer.shape[0], gl.SliceLayout(1, LAYOUT))
    buffer.store(gl.where((row < rows)[:, None], value, gl.zeros_like(value)))


@gluon.jit
def _add_tile(total, product, row, column, staging, PLACE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Adds a warp group's part of a tile to the total, piece by piece through shared memory. A piece waits until the
    copy engine has read the one before it in the same buffer."""
    if product.shape[1] > staging.shape[2]:
        half: gl.constexpr = product.shape[1] // 2
        first, second = product.reshape([product.shape[0], 2, half]).permute((0, 2, 1)).split()
        _add_tile(total, first, row, column, staging, PLACE)
        _add_tile(total, second, row, column + half, staging, PLACE + half)
    else:
        part = staging.index((PLACE // product.shape[1]) % staging.shape[0])
        tma.store_wait(staging.shape[0] - 1)
        part.store(product)
        fence_async_shared()
        _add_bulk(total, [row, column], part)


@gluon.jit
def _add_registers(pointer, product, row, column, in_width, MMA: gl.constexpr):  # type: ignore[no-untyped-def]
    """Adds a warp group's part of a tile to the total from registers."""
    o = row + gl.arange(0, product.shape[0], gl.SliceLayout(1, MMA))
    i = column + gl.arange(0, product.shape[1], gl.SliceLayout(0, MMA))
    at = pointer + o.to(gl.int64)[:, None] * in_width + i[None, :]
    gl.atomic_add(at, product, mask=(i < in_width)[None, :], sem="relaxed")


@gluon.jit
def _take(queue, ready, taken, slot, slot_phase):  # type: ignore[no-untyped-def]
    """Returns the tile that the loading warp has put into a slot of the queue."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(ready.index(slot), slot_phase)
    tile = gl.max(queue.index(slot).load(ONE), axis=0)
    mbarrier.arrive(taken.index(slot), count=1)
    return tile


@gluon.jit
def _compute_tiles(  # type: ignore[no-untyped-def]
    total, pointer, ends, queue, ready, taken, half, wide, full, empty, staging, tiles, tiles_out, tiles_in, out_width,
    in_width, WHICH: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, TURNS: gl.constexpr,
    BULK: gl.constexpr,
):  # fmt: skip
    """Computes 64 outputs of each tile: the first (WHICH is 0) or the second half."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    step = 0
    phase = 0
    slot = 0
    slot_phase = 0
    tile = gl.program_id(0)
    if not TURNS:
        tile = _take(queue, ready, taken, slot, slot_phase)
        slot, slot_phase = _after(slot, slot_phase, 2)
    while tile < tiles:
        group, o, i = _place(tile, tiles_out, tiles_in, BAND)
        start, end = _rows_of(ends, group)
        if start < end:
            product = gl.zeros([64, 256], gl.float32, MMA)
            last = step
            for row in range(start, end, ROWS):
                mbarrier.wait(full.index(step), phase)
                if end - row < ROWS:  # the tiles reach into the next group's rows
                    # Both warp groups write the same values to `wide`.
                    _blank(half.index(step), end - row, LOAD)
                    _blank(wide.index(step), end - row, LOAD)
                    fence_async_shared()
                flying = warpgroup_mma(half.index(step).permute((1, 0)), wide.index(step), product, is_async=True)
                product = warpgroup_mma_wait(1, deps=[flying])
                mbarrier.arrive(empty.index(last), count=1, pred=row > start)
                last = step
                step, phase = _after(step, phase, STAGES)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(last), count=1)
            first_out = group * out_width + o * 128 + WHICH * 64
            if BULK:
                _add_tile(total, product, first_out, i * 256, staging, 0)
            else:
                _add_registers(pointer, product, first_out, i * 256, in_width, MMA)
        if TURNS:
            tile += gl.num_programs(0)
        else:
            tile = _take(queue, ready, taken, slot, slot_phase)
            slot, slot_phase = _after(slot, slot_phase, 2)
    if BULK:
        tma.store_wait(0)


@gluon.jit
def _accumulate_specialized_kernel(  # type: ignore[no-untyped-def]
    total, left, right, pointer, ends, next_tile, groups, out_width, in_width,
    ROWS: gl.constexpr, STAGES: gl.constexpr, PIECE: gl.constexpr, BUFFERS: gl.constexpr, BAND: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    BULK: gl.constexpr = BUFFERS > 0
    tiles_out = out_width // 128
    tiles_in = gl.cdiv(in_width, 256)
    tiles = tiles_out * tiles_in * groups
    upper = gl.allocate_shared_memory(left.dtype, [STAGES, ROWS, 64], left.layout)
    lower = gl.allocate_shared_memory(left.dtype, [STAGES, ROWS, 64], left.layout)
    wide = gl.allocate_shared_memory(right.dtype, [STAGES, ROWS, 256], right.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for step in gl.static_range(STAGES):
        mbarrier.init(full.index(step), count=1)
        mbarrier.init(empty.index(step), count=2)
    queue = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for slot in gl.static_range(2):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(taken.index(slot), count=2)
    if BULK:
        first = gl.allocate_shared_memory(gl.float32, [BUFFERS, 64, PIECE], total.layout)
        second = gl.allocate_shared_memory(gl.float32, [BUFFERS, 64, PIECE], total.layout)
    else:
        first = queue
        second = queue
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute_tiles, (
                total, pointer, ends, queue, ready, taken, upper, wide, full, empty, first, tiles, tiles_out, tiles_in,
                out_width, in_width, 0, ROWS, STAGES, BAND, TURNS, BULK,
            )),
            (_compute_tiles, (
                total, pointer, ends, queue, ready, taken, lower, wide, full, empty, second, tiles, tiles_out, tiles_in,
                out_width, in_width, 1, ROWS, STAGES, BAND, TURNS, BULK,
            )),
            (_load_tiles, (
                left, right, ends, queue, ready, taken, next_tile, upper, lower, wide, full, empty, tiles, tiles_out,
                tiles_in, ROWS, STAGES, BAND, TURNS,
            )),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip


def takes(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Returns whether the kernel can compute total [groups, out, in] += left [rows, out]^T right [rows, in]."""
    return (
        left.is_cuda
        and left.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(left.device)[0] == 9
        and left.shape[0] > 0
        and total.shape[1] % OUT_TILE == 0
        and total.shape[2] % 8 == 0
        and not any(tensor.data_ptr() % 16 for tensor in (total, left, right))
    )


def accumulate_specialized(total: Tensor, left: Tensor, right: Tensor, ends: Tensor, sizes: Specialization) -> None:
    """Computes total[e] += left_e^T right_e for contiguous factors of 16 bits; `ends` is int32 [groups]."""
    groups, out_width, in_width = total.shape
    factor, sums = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(128, 32, 2)
    programs = num_multiprocessors(left.device)
    next_tile = ends if sizes.takes_turns else torch.zeros(1, dtype=torch.int32, device=ends.device)
    _accumulate_specialized_kernel[(programs,)](
        TensorDescriptor.from_tensor(total.view(-1, in_width), [64, sizes.piece], sums),
        TensorDescriptor.from_tensor(left, [sizes.rows, 64], factor),
        TensorDescriptor.from_tensor(right, [sizes.rows, 256], factor),
        total, ends, next_tile, groups, out_width, in_width,
        ROWS=sizes.rows, STAGES=sizes.stages, PIECE=sizes.piece, BUFFERS=sizes.buffers, BAND=sizes.band,
        TURNS=sizes.takes_turns, num_warps=4,
    )  # fmt: skip
