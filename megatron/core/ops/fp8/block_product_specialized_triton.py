"""Products of fp8 matrices with a scale for each block, on Hopper GPUs, by warps with different tasks.

The method is that of DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2).

The tensor cores multiply one block of 128 terms at a time. Its product is scaled and added in float32 by the other
units, and in plain Triton the tensor cores wait meanwhile. Here one program runs on each multiprocessor and computes
tiles of 128 x 128 outputs, one after the other. Its warps have two tasks:

- One warp loads. It copies blocks of both operands and their factors into a ring of stages. It does not wait for a tile
  to be finished before it loads for the next one.
- Two warp groups of four warps compute. Each has 64 rows of the tile and keeps their sums in registers. The warp groups
  are not in step: while one scales and adds its product, or stores a tile, the products of the other run.

Barriers `full` and `empty` of each stage order the tasks (`gluon_ring`).

The order of the additions to a number does not depend on which program computes it, so results are the same at every
run. Nothing waits on the host, so CUDA graphs can capture the kernels. They are written in Gluon, Triton's language
with explicit layouts and barriers. Triton's interpreter does not run it.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
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

from megatron.core.ops.fp8.grouped import QuantizedGroups, Segments
from megatron.core.ops.gluon_copies import add_bulk, load_bulk, store_bulk
from megatron.core.ops.gluon_ring import DONE, ask, place_in_band, ring_barriers, tell, tell_done
from megatron.core.ops.sum_rows_triton import num_multiprocessors
from megatron.core.ops.tiles import cdiv

BLOCK = gl.constexpr(128)
"""Terms with one scale, and the sides of a tile."""
HALF = gl.constexpr(64)
"""Rows of a warp group."""
ROW_STAGES, WEIGHT_STAGES = 5, 4
"""Stages of the rings; shared memory has no room for more."""


# ---------------------------------------------------------------------------------------------------------------------
# Rows times weights


@gluon.jit
def _load_rows(  # type: ignore[no-untyped-def]
    row_tiles, weight_tiles, factor_tiles, weight_factors, of_blocks, ends, block_ends, plan, weights, a, b, factors,
    full, empty, number, per_group, tiles, blocks, step, row_step, group_step, line_step, block_step,
    TRANSPOSED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    count = 0
    last = gl.load(block_ends + number - 1)
    for tile in range(gl.program_id(0), last * tiles, gl.num_programs(0)):
        row_block, out = place_in_band(tile, last, tiles)
        segment = gl.load(of_blocks + row_block)
        start = gl.load(ends + segment - 1, mask=segment > 0, other=0)
        first_block = gl.load(block_ends + segment - 1, mask=segment > 0, other=0)
        end = gl.load(ends + segment)
        group = segment // per_group
        first = start + (row_block - first_block) * BLOCK
        of_weight = weight_factors + group * group_step + out * line_step
        factor = gl.load(of_weight)
        for block in range(blocks):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), count // STAGES & 1 ^ 1)
            if block == 0:
                tell(plan, stage, first)
                tell(plan, STAGES + stage, end)
                tell(plan, 2 * STAGES + stage, out)
            tell(weights, stage, factor)
            mbarrier.expect(full.index(stage), 2 * BLOCK * BLOCK + BLOCK * 4)
            load_bulk(row_tiles, [first, block * BLOCK], full.index(stage), a.index(stage))
            if TRANSPOSED:
                at = [out * BLOCK, group * step + block * BLOCK]
            else:
                at = [group * step + out * BLOCK, block * BLOCK]
            load_bulk(weight_tiles, at, full.index(stage), b.index(stage))
            load_bulk(factor_tiles, [block * row_step + row_block * BLOCK], full.index(stage), factors.index(stage))
            of_weight += block_step
            factor = gl.load(of_weight, mask=block + 1 < blocks, other=0.0)
            count += 1
    tell_done(plan, full, empty, count, STAGES)


@gluon.jit
def _multiply_rows(  # type: ignore[no-untyped-def]
    output_tiles, output, plan, weights, a, b, factors, staging, full, empty, width, blocks,
    STAGES: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Computes the first (WHICH is 0) or the last HALF rows of each tile."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    count = 0
    mbarrier.wait(full.index(0), 0)
    first = ask(plan, 0)
    while first != DONE:
        stage = count % STAGES
        first += WHICH * HALF
        end, out = ask(plan, STAGES + stage), ask(plan, 2 * STAGES + stage) * BLOCK
        total = gl.zeros([HALF, BLOCK], gl.float32, SUMS)
        none = gl.zeros([HALF, BLOCK], gl.float32, SUMS)
        for _ in range(blocks):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            left, right = a.index(stage).slice(WHICH * HALF, HALF, 0), b.index(stage).permute((1, 0))
            product = warpgroup_mma(left, right, none, use_acc=False, is_async=True)
            factor = factors.index(stage).slice(WHICH * HALF, HALF, 0).load(gl.SliceLayout(1, SUMS))
            factor *= ask(weights, stage)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(stage), count=1)
            total += product * factor[:, None]
            count += 1
        rounded = total.to(output_tiles.dtype)
        if first + HALF <= end:
            tma.store_wait(0)
            staging.store(rounded)
            fence_async_shared()
            store_bulk(output_tiles, [first, out], staging)
        else:  # other rows follow, which are not this tile's
            row = first + gl.arange(0, HALF, gl.SliceLayout(1, SUMS))
            column = out + gl.arange(0, BLOCK, gl.SliceLayout(0, SUMS))
            at = output + row.to(gl.int64)[:, None] * width + column[None, :]
            gl.store(at, rounded, mask=(row < end)[:, None] & (column < width)[None, :])
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        first = ask(plan, stage)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["row_step"])
def _product_of_blocks_kernel(  # type: ignore[no-untyped-def]
    output_tiles, output, row_tiles, weight_tiles, factor_tiles, weight_factors, of_blocks, ends, block_ends, number,
    per_group, tiles, width, blocks, step, row_step, group_step, line_step, block_step,
    TRANSPOSED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a = gl.allocate_shared_memory(row_tiles.dtype, [STAGES, BLOCK, BLOCK], row_tiles.layout)
    b = gl.allocate_shared_memory(weight_tiles.dtype, [STAGES, BLOCK, BLOCK], weight_tiles.layout)
    staging = gl.allocate_shared_memory(output_tiles.dtype, [2, HALF, BLOCK], output_tiles.layout)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], factor_tiles.layout)
    plan = gl.allocate_shared_memory(gl.int32, [3 * STAGES, 1], VECTOR)
    weights = gl.allocate_shared_memory(gl.float32, [STAGES, 1], VECTOR)
    full, empty = ring_barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (_multiply_rows, (output_tiles, output, plan, weights, a, b, factors, staging.index(0), full, empty, width,
             blocks, STAGES, 0)),
            (_multiply_rows, (output_tiles, output, plan, weights, a, b, factors, staging.index(1), full, empty, width,
             blocks, STAGES, 1)),
            (_load_rows, (row_tiles, weight_tiles, factor_tiles, weight_factors, of_blocks, ends, block_ends, plan,
             weights, a, b, factors, full, empty, number, per_group, tiles, blocks, step, row_step, group_step,
             line_step, block_step, TRANSPOSED, STAGES)),
        ],
        [4, 1],  # warps of the second and the third task; the first runs on the program's own four
        [240, 40],  # registers of their threads
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Weight gradients


@gluon.jit
def _load_columns(  # type: ignore[no-untyped-def]
    left_tiles, right_tiles, left_factor_tiles, right_factor_tiles, block_ends, counter, plan, a, b, left_factors,
    right_factors, full, empty, groups, per_group, tiles_out, tiles_in, left_step, right_step, STAGES: gl.constexpr,
):  # fmt: skip
    count = 0
    of_group = tiles_out * tiles_in
    tile = gl.program_id(0)
    while tile < groups * of_group:
        following = gl.num_programs(0) + gl.atomic_add(counter, 1)
        group, inside_group = tile // of_group, tile % of_group
        row_tile, column_tile = place_in_band(inside_group, tiles_out, tiles_in)
        out, into = row_tile * BLOCK, column_tile * BLOCK
        segment = group * per_group
        block = gl.load(block_ends + segment - 1, mask=segment > 0, other=0)
        last = gl.load(block_ends + segment + per_group - 1)
        for number in range(block, last):  # a group without rows takes no stage
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), count // STAGES & 1 ^ 1)
            if number == block:
                tell(plan, stage, group)
                tell(plan, STAGES + stage, out)
                tell(plan, 2 * STAGES + stage, into)
                tell(plan, 3 * STAGES + stage, last - block)
            mbarrier.expect(full.index(stage), 2 * BLOCK * BLOCK + 2 * BLOCK * 4)
            load_bulk(left_tiles, [out, number * BLOCK], full.index(stage), a.index(stage))
            load_bulk(right_tiles, [into, number * BLOCK], full.index(stage), b.index(stage))
            load_bulk(left_factor_tiles, [number * left_step + out], full.index(stage), left_factors.index(stage))
            load_bulk(right_factor_tiles, [number * right_step + into], full.index(stage), right_factors.index(stage))
            count += 1
        tile = following
    tell_done(plan, full, empty, count, STAGES)


@gluon.jit
def _multiply_columns(  # type: ignore[no-untyped-def]
    total_tiles, plan, a, b, left_factors, right_factors, staging, full, empty,
    STAGES: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Computes the first (WHICH is 0) or the last HALF rows of each tile."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    count = 0
    mbarrier.wait(full.index(0), 0)
    group = ask(plan, 0)
    while group != DONE:
        stage = count % STAGES
        out, into = ask(plan, STAGES + stage), ask(plan, 2 * STAGES + stage)
        blocks = ask(plan, 3 * STAGES + stage)
        total = gl.zeros([HALF, BLOCK], gl.float32, SUMS)
        none = gl.zeros([HALF, BLOCK], gl.float32, SUMS)
        for _ in range(blocks):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            left, right = a.index(stage).slice(WHICH * HALF, HALF, 0), b.index(stage).permute((1, 0))
            product = warpgroup_mma(left, right, none, use_acc=False, is_async=True)
            left_factor = left_factors.index(stage).slice(WHICH * HALF, HALF, 0).load(gl.SliceLayout(1, SUMS))
            right_factor = right_factors.index(stage).load(gl.SliceLayout(0, SUMS))
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(stage), count=1)
            total += product * (left_factor[:, None] * right_factor[None, :])
            count += 1
        tma.store_wait(0)
        staging.store(total.reshape([1, HALF, BLOCK]))
        fence_async_shared()
        add_bulk(total_tiles, [group, out + WHICH * HALF, into], staging)
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        group = ask(plan, stage)
    tma.store_wait(0)


@gluon.jit
def _gradient_of_blocks_kernel(  # type: ignore[no-untyped-def]
    total_tiles, left_tiles, right_tiles, left_factor_tiles, right_factor_tiles, block_ends, counter, groups, per_group,
    tiles_out, tiles_in, left_step, right_step, STAGES: gl.constexpr,
):  # fmt: skip
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a = gl.allocate_shared_memory(left_tiles.dtype, [STAGES, BLOCK, BLOCK], left_tiles.layout)
    b = gl.allocate_shared_memory(right_tiles.dtype, [STAGES, BLOCK, BLOCK], right_tiles.layout)
    staging = gl.allocate_shared_memory(gl.float32, [2, 1, HALF, BLOCK], total_tiles.layout)
    left_factors = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], left_factor_tiles.layout)
    right_factors = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], right_factor_tiles.layout)
    plan = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 1], VECTOR)
    full, empty = ring_barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (_multiply_columns, (total_tiles, plan, a, b, left_factors, right_factors, staging.index(0), full, empty,
             STAGES, 0)),
            (_multiply_columns, (total_tiles, plan, a, b, left_factors, right_factors, staging.index(1), full, empty,
             STAGES, 1)),
            (_load_columns, (left_tiles, right_tiles, left_factor_tiles, right_factor_tiles, block_ends, counter, plan,
             a, b, left_factors, right_factors, full, empty, groups, per_group, tiles_out, tiles_in, left_step,
             right_step, STAGES)),
        ],
        [4, 1],
        [240, 40],
    )  # fmt: skip


def _fp8_tiles(values: Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(values, [BLOCK.value, BLOCK.value], gl.NVMMASharedLayout(128, 8, 2))


def _factor_tiles(factors: Tensor) -> tuple[TensorDescriptor, int]:
    """Returns factors [lines, blocks], block after block, in tiles of BLOCK lines, and the distance between two blocks.
    It divides by 4: the copy engine refuses addresses that do not divide by 16 as an illegal instruction."""
    lines = factors.t().contiguous()
    if lines.shape[1] % 4:
        lines = pad(lines, (0, -lines.shape[1] % 4))
    return TensorDescriptor.from_tensor(lines.view(-1), [BLOCK.value], gl.NVMMASharedLayout(0, 32, 1)), lines.shape[1]


def product_of_blocks(
    rows: QuantizedGroups, weight: QuantizedGroups, segments: Segments, dtype: torch.dtype, *, transposed: bool
) -> Tensor:
    """Computes `grouped.product_of_groups` of blocks and squares, with results of 16 bits."""
    (n, k), height = rows.values.shape, weight.values.shape[0]
    width = height if transposed else height // segments.groups
    output = torch.empty(n, width, dtype=dtype, device=rows.values.device)
    in_out, in_k = cdiv(width, BLOCK.value), cdiv(k, BLOCK.value)
    factor_tiles, row_step = _factor_tiles(rows.factors)
    line, block = weight.factors.stride()
    steps = (in_k * block, line, block) if transposed else (in_out * line, line, block)
    programs = min(segments.blocks * in_out, num_multiprocessors(output.device))
    _product_of_blocks_kernel[(programs,)](
        TensorDescriptor.from_tensor(output, [HALF.value, BLOCK.value], gl.NVMMASharedLayout(128, 16, 2)), output,
        _fp8_tiles(rows.values), _fp8_tiles(weight.values), factor_tiles, weight.factors,
        segments.of_blocks, segments.ends, segments.block_ends, segments.number, segments.per_group, in_out, width,
        in_k, weight.values.shape[1] // segments.groups if transposed else width,
        row_step, *steps,
        TRANSPOSED=transposed, STAGES=ROW_STAGES, num_warps=4,
    )  # fmt: skip
    return output


def accumulate_product_of_blocks(
    total: Tensor, left: QuantizedGroups, right: QuantizedGroups, segments: Segments
) -> None:
    """Computes `grouped.accumulate_product_of_groups` of blocks, into float32 totals."""
    number, out_width, in_width = total.shape
    tiles_out, tiles_in = cdiv(out_width, BLOCK.value), cdiv(in_width, BLOCK.value)
    (left_factors, left_step), (right_factors, right_step) = _factor_tiles(left.factors), _factor_tiles(right.factors)
    counter = torch.zeros(1, dtype=torch.int32, device=total.device)
    _gradient_of_blocks_kernel[(min(number * tiles_out * tiles_in, num_multiprocessors(total.device)),)](
        TensorDescriptor.from_tensor(total, [1, HALF.value, BLOCK.value], gl.NVMMASharedLayout(128, 32, 3)),
        _fp8_tiles(left.values), _fp8_tiles(right.values), left_factors, right_factors, segments.block_ends, counter,
        number, segments.per_group, tiles_out, tiles_in, left_step, right_step, STAGES=WEIGHT_STAGES, num_warps=4,
    )  # fmt: skip
