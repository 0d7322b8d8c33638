"""Backward of flash attention on Hopper GPUs by warps with different tasks (Shah et al. 2024, FlashAttention-3).

Plain Triton runs the five products of a tile and the exponentials between them one after the other, and its tensor
cores wait meanwhile. Here a program holds 128 keys and values with their gradients, as in `flash_backward_triton`, and
its warps have two tasks:

- One warp loads. It copies tiles of queries and of the output's gradient into a ring of STAGES stages.
- Two warp groups of four warps compute. Each holds 64 of the keys. While one computes exponentials, the products of the
  other run.

Scores are [keys, queries], so probabilities P and gradients of scores dS stay in registers as factors of dV = P dO and
dK = dS Q. For the gradients of queries, dQ = dS^T K, a warp group needs the dS of the other one too: both write dS to
shared memory, and each computes half of dQ, half of the channels (width 128) or of the queries (width 64). The copy
engine adds finished halves to float32 sums in memory, in an order that differs from run to run.

These sums are in blocks of 64 queries and 64 channels. A block has its numbers in the order in which threads hold them,
so that threads write them to shared memory 16 bytes at a time and without bank conflicts. `_round_kernel` restores the
order.

In deterministic mode (TURNS) the engine adds in the order of the keys. A block has a turn in memory: the tile of keys
whose program adds next. A warp group waits for its turn, adds, and passes the turn on once the engine has written the
sums, which is in its next step. Programs walk over the queries from the last one down, so that those of one head, which
start together, wait one step for each other and then stay in step. A program takes its tile from a counter when it
begins, so the programs that it waits for have begun.

Dropout needs no barrier: a thread of a warp group loads the bits of its own probabilities (`KeepBits.by_key`). Rounded
probabilities are dropped for dV. For dS, dP is dropped after the wait for it: dropped probabilities in float32 would
need more registers than there are.

Barriers order the tasks:

- `keys_there`: keys and values are loaded.
- `full` of a stage: its tiles are loaded. The copy engine completes it, and the loading warp arrives once more for the
  statistics, which it writes itself.
- `empty` of a stage: it may be overwritten. Both warp groups arrive when their products no longer read it.
- `exchanged` of a buffer of dS: both warp groups have written their halves. Two buffers need no second barrier: who
  writes to a buffer again has seen the barrier of the other one, at which both arrived after they had read this one.

A barrier alternates between phases 0 and 1, and a wait names the phase whose end it waits for. A new barrier is in
phase 0, and the phase before it counts as ended: the warp groups start with phase 0 of `full`, the loading warp with
phase 1 of `empty`. All tasks compute the same list of tiles.

The kernel allocates no memory of the GPU, and nothing waits on the host, so CUDA graphs can capture it. It is written
in Gluon, Triton's language with explicit layouts and barriers. Triton's interpreter does not run it.
"""

import torch
import triton
import triton.language as tl
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

from megatron.core.ops.attention.flash_forward_specialized_triton import round_pairs
from megatron.core.ops.attention.flash_forward_triton import LOG2_E, Sight, begin_at_16_bytes, row_length
from megatron.core.ops.dropout.keep_bits_gluon import drop_pairs, find_kept, load_words
from megatron.core.ops.dropout.keep_bits_triton import BLOCK
from megatron.core.ops.gluon_copies import add_bulk, head_tiles, load_bulk, store_bulk
from megatron.core.ops.tiles import cdiv

KEYS = gl.constexpr(64)
"""Keys of a warp group."""
STAGES, BUFFERS = gl.constexpr(2), gl.constexpr(2)
"""Stages of the ring, and halves of dQ that the copy engine adds at the same time for each warp group."""
TILE_KEYS = 2 * KEYS.value
"""Keys of a program."""
_QUERIES = {64: 128, 128: 64}
"""Queries of a tile, by the width of heads. Registers and shared memory allow no more."""


@gluon.jit
def _find_walk(  # type: ignore[no-untyped-def]
    edges, row_length, queries, keys, query_start, key_start, left, right, n,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Returns the first of the queries that see some of the program's keys, rounded down to a tile, and the number of
    their tiles; and the range of queries that see all of these keys."""
    N: gl.constexpr = 2 * KEYS
    behind = gl.minimum(n + N, keys)
    first, last, whole, whole_end = 0, queries, 0, queries + M
    if HAS_RIGHT:
        first = gl.maximum(0, n - right)
        whole = n + N - 1 - right
    if HAS_LEFT:
        last = gl.minimum(last, behind + left)
        whole_end = gl.minimum(whole_end, n + left + 1)
    if PACKED:
        first_start = gl.load(edges + key_start + n) - query_start
        last_start = gl.load(edges + key_start + behind - 1) - query_start
        last_end = gl.load(edges + row_length + key_start + behind - 1) - query_start
        first, last = gl.maximum(first, first_start), gl.minimum(last, last_end)
        whole = gl.maximum(whole, first_start)
        whole_end = gl.where(first_start == last_start, gl.minimum(whole_end, last_end), 0)
    whole_end = gl.where(n + N <= keys, whole_end, 0)
    first = first // M * M
    return first, gl.cdiv(gl.maximum(last - first, 0), M), whole, whole_end


@gluon.jit
def _place(groups, order, turns, ORDERED: gl.constexpr, TURNS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns batch, group and first key of a program. Programs of the same tile of keys start together."""
    pair, tile = gl.program_id(0), gl.program_id(1)
    if TURNS:
        number = gl.atomic_add(turns, 1)
        pair, tile = number % gl.num_programs(0), number // gl.num_programs(0)
    elif ORDERED:
        tile = gl.load(order + tile)
    return pair // groups, pair % groups, tile * (2 * KEYS)


@gluon.jit
def _await_turn(turn, tile):  # type: ignore[no-untyped-def]
    """Waits until `turn` is `tile`: the first warp of a warp group waits, and a thread of it begins the addition."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 t;
        mov.u32 t, %tid.x;
        and.b32 t, t, 96;
        setp.ne.u32 p, t, 0;
        @p bra THERE;
        AGAIN:
        ld.acquire.gpu.global.u32 t, [$1];
        setp.ne.u32 p, t, $2;
        @p bra AGAIN;
        fence.proxy.async.global;
        THERE:
        bar.warp.sync 0xffffffff;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [turn, tile],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _pass_turn(turn, tile):  # type: ignore[no-untyped-def]
    """Waits until the engine has written all additions of this thread, then sets `turn` to `tile`."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 t;
        cp.async.bulk.wait_group 0;
        fence.proxy.async.global;
        bar.warp.sync 0xffffffff;
        mov.u32 t, %tid.x;
        and.b32 t, t, 127;
        setp.eq.u32 p, t, 0;
        @p st.release.gpu.global.u32 [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [turn, tile],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _load_tiles(  # type: ignore[no-untyped-def]
    query_tiles, gradient_tiles, key_tiles, value_tiles, statistics, q_ring, dy_ring, k_tile, v_tile, sums, deltas,
    keys_there, full, empty, batch, group, n, first, count, groups, shared, rounded,
    TURNS: gl.constexpr, M: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Loads the program's keys and values, then tiles of queries into each stage that both warp groups have released.
    Rows behind the last query are zeros, and `statistics` gives them probabilities of 0."""
    mbarrier.expect(keys_there, 4 * KEYS * WIDTH * 2)
    for half in gl.static_range(2):
        load_bulk(key_tiles, [batch, group, n + half * KEYS, 0], keys_there, k_tile.index(half))
        load_bulk(value_tiles, [batch, group, n + half * KEYS, 0], keys_there, v_tile.index(half))
    LAYOUT: gl.constexpr = gl.BlockedLayout([2, 2], [32, 1], [1, 1], [1, 0])
    i = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))[:, None] * 2 + gl.arange(0, 2, gl.SliceLayout(0, LAYOUT))[None, :]
    for t in range(shared * count):
        step = t % STAGES
        place = t % count
        if TURNS:
            place = count - 1 - place
        head, m = group * shared + t // count, first + place * M
        pair = (batch * groups * shared + head).to(gl.int64)
        row_sums, delta = gl.split(gl.load(statistics + (pair * rounded + m) * 2 + i))
        mbarrier.wait(empty.index(step), t // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(step), 2 * M * WIDTH * 2)
        load_bulk(query_tiles, [batch, head, m, 0], full.index(step), q_ring.index(step))
        load_bulk(gradient_tiles, [batch, head, m, 0], full.index(step), dy_ring.index(step))
        sums.index(step).store(row_sums)
        deltas.index(step).store(delta)
        mbarrier.arrive(full.index(step), count=1)


@gluon.jit
def _load_words(bits, pair, m, queries, keys, M: gl.constexpr, SCORES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the words of the tile of queries from m on. `bits` are those of the warp group's first key."""
    row, blocks = gl.cdiv(keys, BLOCK) * BLOCK, gl.cdiv(queries, BLOCK)
    # Where no query sees the keys, m may be behind the last query.
    block = pair * blocks + gl.minimum(m // BLOCK, blocks - 1)
    return load_words(bits + block * (4 * row), 1, row, M, SCORES)


@gluon.jit
def _compute_tiles(  # type: ignore[no-untyped-def]
    part_tiles, key_gradient_tiles, value_gradient_tiles, bits, edges, turns, q_ring, dy_ring, k_tile, v_tile, ds_ring,
    sums, deltas, staging, keys_there, full, empty, exchanged, batch, group, n, first, count, whole, whole_end, groups,
    shared, row_length, queries, keys, query_start, key_start, left, right, num_tiles, scale, factor, keep_scale,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr, DROPS: gl.constexpr, TURNS: gl.constexpr,
    M: gl.constexpr, WIDTH: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Computes the gradients of KEYS keys and values, the first (WHICH is 0) or the last ones of the program, and adds
    half of each tile's gradients of queries to the parts."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    PART: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=TOTAL, k_width=2)
    dtype: gl.constexpr = q_ring.dtype
    # Key j is seen by queries from `start` to before `end`.
    j = n + WHICH * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    start, end = j * 0, j * 0 + queries
    if HAS_RIGHT:
        start = j - right
    if HAS_LEFT:
        end = j + left + 1
    if PACKED:
        start = gl.maximum(start, gl.load(edges + key_start + j, mask=j < keys, other=0) - query_start)
        end = gl.minimum(end, gl.load(edges + row_length + key_start + j, mask=j < keys, other=0) - query_start)
    end = gl.where(j < keys, end, 0)
    i = gl.arange(0, M, gl.SliceLayout(0, SCORES))
    k, v = k_tile.index(WHICH).reshape([KEYS, WIDTH]), v_tile.index(WHICH).reshape([KEYS, WIDTH])
    no_scores = gl.zeros([KEYS, M], gl.float32, SCORES)
    no_part = gl.zeros([64, 64], gl.float32, PART)
    key_total = gl.zeros([KEYS, WIDTH], gl.float32, TOTAL)
    value_total = gl.zeros([KEYS, WIDTH], gl.float32, TOTAL)
    total = shared * count
    # The walk over the queries of a head: its first and last tile, and its direction.
    STEP: gl.constexpr = -1 if TURNS else 1
    begin, final = first, first + (count - 1) * M
    if TURNS:
        begin, final = first + gl.maximum(count - 1, 0) * M, first
    m, head = begin, 0
    if DROPS:
        first_pair = ((batch * groups + group) * shared).to(gl.int64)
        bits += n + WHICH * KEYS
        words = _load_words(bits, first_pair, m, queries, keys, M, SCORES)
    mbarrier.wait(keys_there, 0)
    mbarrier.wait(full.index(0), 0, pred=total > 0)
    scores = warpgroup_mma(k, q_ring.index(0).reshape([M, WIDTH]).permute((1, 0)), no_scores, use_acc=False)
    # Blocks of 64 x 64 numbers: two for each tile of queries of each head.
    block = ((batch * groups + group) * shared * num_tiles + begin // M) * 2 + WHICH
    if TURNS:  # of the numbers before the turns, the first counts programs; the second belongs to no block
        turn, tile = turns + 1, n // (2 * KEYS)
    for t in range(total):
        step = t % STAGES
        q, dy = q_ring.index(step).reshape([M, WIDTH]), dy_ring.index(step).reshape([M, WIDTH])
        flying = warpgroup_mma(v, dy.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        row_sums = sums.index(step).load(gl.SliceLayout(0, SCORES))
        weight = gl.exp2(scores * factor + row_sums[None, :])
        if (m < whole) | (m + M > whole_end):
            query = m + i
            seen = (query[None, :] >= start[:, None]) & (query[None, :] < end[:, None])
            weight = gl.where(seen, weight, 0.0)
        if DROPS:
            kept = words
            if M < BLOCK:
                kept = words >> m % BLOCK // 16
            rounded_weight = drop_pairs(round_pairs(weight, dtype), kept, M, SCORES)
            rounded_weight = gl.convert_layout(rounded_weight, FACTOR)
        else:
            rounded_weight = gl.convert_layout(weight.to(dtype), FACTOR)
        weight_gradient = warpgroup_mma_wait(0, deps=[flying])
        if DROPS:
            weight_gradient = gl.where(find_kept(kept, M, SCORES), weight_gradient, 0.0)
        delta = deltas.index(step).load(gl.SliceLayout(0, SCORES))
        score_gradient = (weight * (weight_gradient + delta[None, :])).to(dtype)
        # This product could begin before the wait for dP, but that is slower: 5.53 instead of 5.29 ms at width 128.
        flying_values = warpgroup_mma(rounded_weight, dy, value_total, is_async=True)
        ds_ring.index(t % 2 * 2 + WHICH).store(score_gradient)
        fence_async_shared()
        mbarrier.arrive(exchanged.index(t % 2), count=1)
        flying_keys = warpgroup_mma(gl.convert_layout(score_gradient, FACTOR), q, key_total, is_async=True)
        mbarrier.wait(exchanged.index(t % 2), t // 2 & 1)
        if TURNS:
            _pass_turn(turn, tile + 1)
        flying_part = no_part
        for half in gl.static_range(2):
            ds = ds_ring.index(t % 2 * 2 + half)
            other = k_tile.index(half).reshape([KEYS, WIDTH])
            if WIDTH == 128:
                other = other.slice(WHICH * 64, 64, 1)
            else:
                ds = ds.slice(WHICH * 64, 64, 1)
            flying_part = warpgroup_mma(ds.permute((1, 0)), other, flying_part, use_acc=half > 0, is_async=True)
        # The two products of the part may still run. The factors in registers are free for the next scores.
        value_total, key_total = warpgroup_mma_wait(2, deps=[flying_values, flying_keys])
        # The next tile's scores. After the last tile these are scores of an old stage, which nobody uses.
        following = (t + 1) % STAGES
        mbarrier.wait(full.index(following), (t + 1) // STAGES & 1, pred=t + 1 < total)
        next_q = q_ring.index(following).reshape([M, WIDTH])
        flying = warpgroup_mma(k, next_q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        head_ends = m == final
        m = gl.where(head_ends, begin, m + STEP * M)
        if DROPS:  # the words of the next tile come from memory until they are used
            head = gl.minimum(gl.where(head_ends, head + 1, head), shared - 1)
            words = _load_words(bits, first_pair + head, m, queries, keys, M, SCORES)
        part = warpgroup_mma_wait(1, deps=[flying_part])
        mbarrier.arrive(empty.index(step), count=1)
        # Four neighbours in memory are four registers of a thread: columns c and c + 1 of rows r and r + 8.
        part = part.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([128, 32])
        tma.store_wait(BUFFERS - 1)
        staging.index(t % BUFFERS).store(part)
        fence_async_shared()
        if TURNS:
            turn = turns + 2 + block
            _await_turn(turn, tile)
        add_bulk(part_tiles, [block * 128, 0], staging.index(t % BUFFERS))
        block += gl.where(head_ends, num_tiles * 2 - (count - 1) * (2 * STEP), 2 * STEP)
        # Waits in the pass that began the product: if it still ran at the start of the next pass, ptxas would run all
        # products one after the other.
        scores = warpgroup_mma_wait(0, deps=[flying])
    if TURNS:
        _pass_turn(turn, tile + 1)
    # Both gradients leave through the memory of the values, which this warp group alone reads.
    at = [batch, group, n + WHICH * KEYS, 0]
    v.store((value_total * keep_scale).to(dtype))
    fence_async_shared()
    store_bulk(value_gradient_tiles, at, v_tile.index(WHICH))
    tma.store_wait(0)
    v.store((key_total * scale).to(dtype))
    fence_async_shared()
    store_bulk(key_gradient_tiles, at, v_tile.index(WHICH))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["query_start", "key_start", "left", "right"])
def _backward_specialized_kernel(  # type: ignore[no-untyped-def]
    part_tiles, query_tiles, gradient_tiles, key_tiles, value_tiles, key_gradient_tiles, value_gradient_tiles,
    statistics, bits, edges, order, turns, groups, shared, row_length, queries, rounded, keys, query_start, key_start,
    left, right, num_tiles, scale, factor, keep_scale, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    PACKED: gl.constexpr, DROPS: gl.constexpr, ORDERED: gl.constexpr, TURNS: gl.constexpr, M: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    batch, group, n = _place(groups, order, turns, ORDERED, TURNS)
    first, count, whole, whole_end = _find_walk(
        edges, row_length, queries, keys, query_start, key_start, left, right, n, HAS_LEFT, HAS_RIGHT, PACKED, M
    )
    dtype: gl.constexpr = query_tiles.dtype
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    DS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, M, WIDTH], query_tiles.layout)
    dy_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, M, WIDTH], gradient_tiles.layout)
    k_tile = gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, WIDTH], key_tiles.layout)
    v_tile = gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, WIDTH], value_tiles.layout)
    ds_ring = gl.allocate_shared_memory(dtype, [4, KEYS, M], DS)
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, M], VECTOR)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, M], VECTOR)
    upper = gl.allocate_shared_memory(gl.float32, [BUFFERS, 128, 32], part_tiles.layout)
    lower = gl.allocate_shared_memory(gl.float32, [BUFFERS, 128, 32], part_tiles.layout)
    keys_there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    exchanged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_there, count=1)
    for step in gl.static_range(STAGES):
        mbarrier.init(full.index(step), count=2)
        mbarrier.init(empty.index(step), count=2)
    for step in gl.static_range(2):
        mbarrier.init(exchanged.index(step), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute_tiles, (part_tiles, key_gradient_tiles, value_gradient_tiles, bits, edges, turns, q_ring,
             dy_ring, k_tile, v_tile, ds_ring, sums, deltas, upper, keys_there, full, empty, exchanged, batch, group,
             n, first, count, whole, whole_end, groups, shared, row_length, queries, keys, query_start, key_start, left,
             right, num_tiles, scale, factor, keep_scale, HAS_LEFT, HAS_RIGHT, PACKED, DROPS, TURNS, M, WIDTH, 0)),
            (_compute_tiles, (part_tiles, key_gradient_tiles, value_gradient_tiles, bits, edges, turns, q_ring,
             dy_ring, k_tile, v_tile, ds_ring, sums, deltas, lower, keys_there, full, empty, exchanged, batch, group,
             n, first, count, whole, whole_end, groups, shared, row_length, queries, keys, query_start, key_start, left,
             right, num_tiles, scale, factor, keep_scale, HAS_LEFT, HAS_RIGHT, PACKED, DROPS, TURNS, M, WIDTH, 1)),
            (_load_tiles, (query_tiles, gradient_tiles, key_tiles, value_tiles, statistics, q_ring, dy_ring, k_tile,
             v_tile, sums, deltas, keys_there, full, empty, batch, group, n, first, count, groups, shared, rounded,
             TURNS, M, WIDTH)),
        ],
        [4, 1],  # warps of the second and the third task; the first runs on the program's own four
        [240, 24],  # registers of their threads
    )  # fmt: skip


@triton.jit
def _round_kernel(  # type: ignore[no-untyped-def]
    output, parts, queries, heads, num_parts, scale, row, batch_stride, head_stride, WIDTH: tl.constexpr
):
    """Writes `scale` times the sums of a block of 64 queries of a head."""
    pair = tl.program_id(1).to(tl.int64)
    output += pair // heads * batch_stride + pair % heads * head_stride
    i = tl.program_id(0) * 64 + tl.arange(0, 64)
    channel = tl.arange(0, 64)
    for part in tl.static_range(WIDTH // 64):
        chunk = pair * num_parts + tl.program_id(0) * (WIDTH // 64) + part
        sums = tl.load(parts + chunk * 4096 + tl.arange(0, 4096))
        sums = tl.permute(tl.reshape(sums, (8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
        sums = tl.reshape(sums, (64, 64)) * scale
        at = output + i[:, None].to(tl.int64) * row + part * 64 + channel[None, :]
        tl.store(at, sums.to(output.dtype.element_ty), mask=(i < queries)[:, None])


def _copied(heads: Tensor, rows: int) -> TensorDescriptor:
    """Returns tiles of heads, or of a copy that the copy engine can read."""
    return head_tiles(heads if begin_at_16_bytes(heads) else heads.clone(memory_format=torch.contiguous_format), rows)


def _first_turns(sight: Sight, queries: int, keys: int, size: int, device: torch.device) -> Tensor | None:
    """Returns for each tile of `size` queries the first tile of keys that adds to it, int32; None: the first of all."""
    if sight.edges is None and sight.left is None:
        return None
    behind = torch.arange(TILE_KEYS, keys + TILE_KEYS, TILE_KEYS, device=device).clamp(max=keys)
    last = torch.full_like(behind, queries)  # `_find_walk`: the query behind the last one that sees some of the keys
    if sight.left is not None:
        last = last.minimum(behind + sight.left)
    if sight.edges is not None:
        last = last.minimum(sight.edges[1, sight.key_start + behind - 1] - sight.query_start)
    return torch.searchsorted(last, torch.arange(0, queries, size, device=device), right=True, out_int32=True)


def _turns(sight: Sight, queries: int, keys: int, size: int, pairs: int, device: torch.device) -> Tensor:
    """Returns a counter of programs, a number that is not used, and the first turns of all blocks."""
    num_tiles = cdiv(queries, size)
    turns = torch.zeros(2 + pairs * num_tiles * 2, dtype=torch.int32, device=device)
    first = _first_turns(sight, queries, keys, size, device)
    if first is not None:
        turns[2:].view(pairs, num_tiles, 2).copy_(first[:, None])
    return turns


def backward_specialized(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    statistics: Tensor,
    scale: float,
    sight: Sight,
    order: Tensor | None,
    query_type: torch.dtype,
    bits: Tensor | None,
    keep_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query (in `query_type`), key and value of calls that `is_plain_on_hopper` accepts.

    `statistics` is float32 [b, a, rounded sq, 2]: for each query the negated lse in units of log 2, and the negated sum
    of output times gradient. Queries without keys and those behind the last one have -inf as negated lse. `order` has
    the tiles of TILE_KEYS keys in the order in which programs should start. In deterministic mode gradients of queries
    are summed in the order of the keys, and are bit-equal in every run.
    """
    sq, b, a, width = query.shape
    groups, size = value.shape[2], _QUERIES[width]
    num_tiles = cdiv(sq, size)
    blocks = num_tiles * size * width // 4096
    parts = query.new_zeros(b * a * blocks * 128, 32, dtype=torch.float32)
    ordered = torch.are_deterministic_algorithms_enabled()
    turns = _turns(sight, sq, key.shape[0], size, b * a, query.device) if ordered else None
    query_gradient = torch.empty_like(query, dtype=query_type, memory_format=torch.contiguous_format)
    key_gradient, value_gradient = key.new_empty(key.shape), value.new_empty(value.shape)
    _backward_specialized_kernel[(b * groups, cdiv(key.shape[0], TILE_KEYS))](
        TensorDescriptor.from_tensor(parts, [128, 32], gl.NVMMASharedLayout(128, 32, 2)),
        _copied(query, size), _copied(gradient, size),
        _copied(key, KEYS.value), _copied(value, KEYS.value),
        head_tiles(key_gradient, KEYS.value), head_tiles(value_gradient, KEYS.value),
        statistics, bits, sight.edges, order, turns, groups, a // groups, row_length(sight), sq, statistics.shape[2],
        key.shape[0], sight.query_start, sight.key_start, sight.left or 0, sight.right or 0, num_tiles,
        scale * keep_scale, scale * LOG2_E, keep_scale,
        HAS_LEFT=sight.left is not None, HAS_RIGHT=sight.right is not None, PACKED=sight.edges is not None,
        DROPS=bits is not None, ORDERED=order is not None, TURNS=ordered, M=size, WIDTH=width, num_warps=4,
    )  # fmt: skip
    _round_kernel[(num_tiles * size // 64, b * a)](
        query_gradient, parts, sq, a, blocks, scale * keep_scale, *query_gradient.stride()[:3], WIDTH=width
    )
    return query_gradient, key_gradient, value_gradient
