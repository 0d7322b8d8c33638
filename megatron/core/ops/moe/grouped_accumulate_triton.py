"""Weight gradients of experts on Hopper GPUs: total[e] += left_e^T right_e by warps with different tasks.

Plain Triton runs the products of a tile, then adds the tile to the total, and its tensor cores wait meanwhile. Here one
program runs on each multiprocessor for the whole call and computes tiles p, p + programs, ... of 128 outputs x 256
inputs. Its warps have three tasks:

- One warp loads. It starts copies of the next rows of both factors into a ring of 7 stages and never waits for a tile
  to be finished: during the end of a tile it already loads rows of the next one.
- Two warp groups of four warps multiply. Each computes 64 of the 128 outputs and keeps its sums in registers.
- The same two warp groups add. They write a finished tile to shared memory in pieces, and the copy engine adds the
  pieces to the total in the cache. The warp groups are not in step, so one multiplies while the other adds.

Two barriers of each stage order these tasks:

- `full`: the stage holds the rows. The loading warp announces the number of bytes, and the copy engine completes the
  barrier when it has written them.
- `empty`: the stage may be overwritten. Both warp groups arrive when their products no longer read the stage.

A barrier alternates between phases 0 and 1, and a wait names the phase whose end it waits for. A new barrier is in
phase 0, and the phase before it counts as ended. Each side changes the phase when its place in the ring wraps. Warp
groups start with phase 0 of `full`: they wait for the first load. The loading warp starts with phase 1 of `empty`,
which counts as ended: new stages are free.

All three tasks compute the same order of tiles and rows from `ends`, so they always agree about the stage. Each element
of the total is added to once per call, so results are the same at every run. The kernel allocates no memory of the GPU,
and nothing waits on the host, so CUDA graphs can capture it.

The kernel is written in Gluon, Triton's language with explicit layouts and barriers. Triton's interpreter does not run
it. Loading warps, warp groups and their barriers are those of CUTLASS's persistent kernels for Hopper ("cooperative"
schedule: https://docs.nvidia.com/cutlass); barriers and phases are described in the PTX ISA under `mbarrier`.
"""

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

OUT, IN = gl.constexpr(128), gl.constexpr(256)
"""Outputs and inputs of a tile."""
HALF = gl.constexpr(64)
"""Outputs of a warp group, and of one copy: the hardware's swizzled rows have 128 bytes."""
ROWS, STAGES = gl.constexpr(32), gl.constexpr(7)
"""Rows of a stage, and stages. A stage takes 24 KiB of shared memory."""
PIECE, BUFFERS = gl.constexpr(32), gl.constexpr(2)
"""Columns of a piece of a finished tile, and pieces of a warp group that the copy engine adds at the same time. Each
takes 8 KiB. BUFFERS divides the pieces of a tile, because each tile starts at the first buffer."""
BAND = gl.constexpr(8)
"""Tile rows that neighbouring programs share, so that they find inputs in the cache."""


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
def _place(tile, tiles_out, tiles_in):  # type: ignore[no-untyped-def]
    """Returns group, first output and first input of a tile. Orders tiles of a group in bands of BAND tile rows."""
    of_group = tiles_out * tiles_in
    inside = tile % of_group
    band = inside // (BAND * tiles_in)
    height = gl.minimum(tiles_out - band * BAND, BAND)
    inside = inside % (BAND * tiles_in)
    return tile // of_group, (band * BAND + inside % height) * OUT, inside // height * IN


@gluon.jit
def _rows_of(ends, group):  # type: ignore[no-untyped-def]
    """Returns the first row of a group and the end of its rows."""
    return gl.load(ends + group - 1, mask=group > 0, other=0), gl.load(ends + group)


@gluon.jit
def _after(step, phase):  # type: ignore[no-untyped-def]
    """Returns the next stage of the ring and the phase of its barriers."""
    wraps = step == STAGES - 1
    return gl.where(wraps, 0, step + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _before(step):  # type: ignore[no-untyped-def]
    """Returns the stage before another."""
    return gl.where(step == 0, STAGES - 1, step - 1)


@gluon.jit
def _load_tiles(  # type: ignore[no-untyped-def]
    left, right, ends, upper, lower, wide, full, empty, tiles, tiles_out, tiles_in
):
    """Loads rows of both factors into each stage that both warp groups have released. Rows behind a group's end belong
    to the next group; `_compute_tiles` sets them to zero."""
    step, phase = 0, 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, first_out, first_in = _place(tile, tiles_out, tiles_in)
        start, end = _rows_of(ends, group)
        for row in range(start, end, ROWS):
            mbarrier.wait(empty.index(step), phase)
            mbarrier.expect(full.index(step), ROWS * (OUT + IN) * 2)
            _load_bulk(left, [row, first_out], full.index(step), upper.index(step))
            _load_bulk(right, [row, first_in], full.index(step), wide.index(step))
            _load_bulk(left, [row, first_out + HALF], full.index(step), lower.index(step))
            step, phase = _after(step, phase)


@gluon.jit
def _blank(buffer, rows):  # type: ignore[no-untyped-def]
    """Sets the rows of a buffer from number `rows` on to zero."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    value = buffer.load(LAYOUT)
    row = gl.arange(0, buffer.shape[0], gl.SliceLayout(1, LAYOUT))
    buffer.store(gl.where((row < rows)[:, None], value, gl.zeros_like(value)))


@gluon.jit
def _add_tile(total, product, row, column, staging, PLACE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Adds columns of a finished tile to the total, from column PLACE of the tile on. Halves them until a piece fits
    into a buffer, and waits until the copy engine has read the buffer's piece before."""
    if product.shape[1] > PIECE:
        half: gl.constexpr = product.shape[1] // 2
        first, second = product.reshape([product.shape[0], 2, half]).permute((0, 2, 1)).split()
        _add_tile(total, first, row, column, staging, PLACE)
        _add_tile(total, second, row, column, staging, PLACE + half)
    else:
        part = staging.index(PLACE // PIECE % BUFFERS)
        tma.store_wait(BUFFERS - 1)
        part.store(product)
        fence_async_shared()
        _add_bulk(total, [row, column + PLACE], part)


@gluon.jit
def _compute_tiles(  # type: ignore[no-untyped-def]
    total, ends, half, wide, full, empty, staging, tiles, tiles_out, tiles_in, out_width, WHICH: gl.constexpr
):
    """Computes HALF outputs of each tile, the upper (WHICH is 0) or the lower ones, and adds them to the total."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, IN, 16])
    step, phase = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, first_out, first_in = _place(tile, tiles_out, tiles_in)
        start, end = _rows_of(ends, group)
        if start < end:
            product = gl.zeros([HALF, IN], gl.float32, SUMS)
            for row in range(start, end, ROWS):
                mbarrier.wait(full.index(step), phase)
                if end - row < ROWS:  # the stage reaches into the next group's rows
                    # Both warp groups write the same values to `wide`.
                    _blank(half.index(step), end - row)
                    _blank(wide.index(step), end - row)
                    fence_async_shared()
                flying = warpgroup_mma(half.index(step).permute((1, 0)), wide.index(step), product, is_async=True)
                # One product may still run, this one. The one before is done, so its stage is released. That stage is
                # computed from `step`. A variable `last = step` at the end of the loop would not be carried from row to
                # row: before the loop it is the same value as `step`, and Triton then takes it for unchanged. Each row
                # would release the tile's first stage, the other stages never, and the loading warp would hang.
                product = warpgroup_mma_wait(1, deps=[flying])
                mbarrier.arrive(empty.index(_before(step)), count=1, pred=row > start)
                step, phase = _after(step, phase)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(_before(step)), count=1)
            _add_tile(total, product, group * out_width + first_out + WHICH * HALF, first_in, staging, 0)
    tma.store_wait(0)


@gluon.jit
def _accumulate_specialized_kernel(total, left, right, ends, groups, out_width, in_width):  # type: ignore[no-untyped-def]
    tiles_out = out_width // OUT
    tiles_in = gl.cdiv(in_width, IN)
    tiles = tiles_out * tiles_in * groups
    upper = gl.allocate_shared_memory(left.dtype, [STAGES, ROWS, HALF], left.layout)
    lower = gl.allocate_shared_memory(left.dtype, [STAGES, ROWS, HALF], left.layout)
    wide = gl.allocate_shared_memory(right.dtype, [STAGES, ROWS, IN], right.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for step in gl.static_range(STAGES):
        mbarrier.init(full.index(step), count=1)
        mbarrier.init(empty.index(step), count=2)
    fence_async_shared()
    first = gl.allocate_shared_memory(gl.float32, [BUFFERS, HALF, PIECE], total.layout)
    second = gl.allocate_shared_memory(gl.float32, [BUFFERS, HALF, PIECE], total.layout)
    gl.warp_specialize(
        [
            (_compute_tiles, (total, ends, upper, wide, full, empty, first, tiles, tiles_out, tiles_in, out_width, 0)),
            (_compute_tiles, (total, ends, lower, wide, full, empty, second, tiles, tiles_out, tiles_in, out_width, 1)),
            (_load_tiles, (left, right, ends, upper, lower, wide, full, empty, tiles, tiles_out, tiles_in)),
        ],
        [4, 1],  # warps of the second and the third task; the first runs on the program's own four
        [232, 24],  # registers of their threads
    )


def takes(total: Tensor, left: Tensor, right: Tensor) -> bool:
    """Returns whether the kernel can compute total [groups, out, in] += left [rows, out]^T right [rows, in].

    It has instructions of capability 9.0 alone, and it moves whole tiles, which must not reach into the next group.
    """
    return (
        left.is_cuda
        and left.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(left.device) == (9, 0)
        and left.shape[0] > 0
        and total.shape[1] % OUT.value == 0
        and total.shape[2] % 8 == 0
        and not any(tensor.data_ptr() % 16 for tensor in (total, left, right))
    )


def accumulate_specialized(total: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    """Computes total[e] += left_e^T right_e for contiguous tensors that `takes` accepts.

    `ends` is int32 [groups]: the end of each group's rows. Rows behind the last end are ignored.
    """
    groups, out_width, in_width = total.shape
    factor, sums = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(128, 32, 2)
    _accumulate_specialized_kernel[(num_multiprocessors(left.device),)](
        TensorDescriptor.from_tensor(total.view(-1, in_width), [HALF.value, PIECE.value], sums),
        TensorDescriptor.from_tensor(left, [ROWS.value, HALF.value], factor),
        TensorDescriptor.from_tensor(right, [ROWS.value, IN.value], factor),
        *(ends, groups, out_width, in_width),
        num_warps=4,
    )
