"""Forward of flash attention on Hopper GPUs by warps with different tasks (Shah et al. 2024, FlashAttention-3).

In plain Triton the tensor cores of a program wait while it computes exponentials. Here one program runs on each
multiprocessor for the whole call and computes tiles of 128 queries of one head, one after the other. Its warps have two
tasks:

- One warp loads. It takes the next tile of queries from a counter in memory, so that programs with short tiles compute
  more of them. It copies the queries, then tiles of keys and values into a ring of stages, and does not wait for a tile
  of queries to be finished.
- Two warp groups of four warps compute. Each has 64 of the queries and keeps their sums in registers. A warp group
  starts the product of its queries with the next keys and the product of its probabilities with the last values, and
  computes exponentials of the first while the second runs. The warp groups are not in step, so the exponentials of one
  run beside the products of the other, too.

A stage holds keys of one tile and values of the tile before, which are used at the same time. The first stage of a tile
of queries has no values and the last one no keys. Tiles of keys come last to first, because the last ones need
comparisons of positions.

Dropout needs no barrier: a thread of a warp group loads the bits of its own scores (`KeepBits.by_query`) before it
waits for a stage, and drops weights after the exponentials, when the bits have come from memory.

Barriers order the tasks:

- `asked` of a warp group: its queries and `plan` are there. `plan` says which tile of queries it is, how many tiles of
  keys follow, and which of them need comparisons.
- `answered` of a warp group: the queries and `plan` may be overwritten.
- `full` of a stage: its keys and values are there. The copy engine completes it.
- `empty` of a stage: it may be overwritten. Both warp groups arrive when their products no longer read it.

A barrier alternates between phases 0 and 1, and a wait names the phase whose end it waits for. A new barrier is in
phase 0, and the phase before it counts as ended. Each side changes the phase when its place in the ring wraps. Warp
groups start with phase 0 of `full`: they wait for the first load. The loading warp starts with phase 1 of `empty`,
which counts as ended: new stages are free.

The order of the additions to a number does not depend on which program computes a tile, so results are the same at
every run. Nothing waits on the host, so CUDA graphs can capture the kernel. It is written in Gluon, Triton's language
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

from megatron.core.ops.attention.flash_forward_triton import (
    LOG2_E,
    Scores,
    Sight,
    begin_at_16_bytes,
    is_plain_on_hopper,
    row_length,
)
from megatron.core.ops.dropout.keep_bits_gluon import drop_pairs, load_words
from megatron.core.ops.gluon_copies import head_tiles, load_bulk, store_bulk
from megatron.core.ops.gluon_ring import DONE, ask, tell
from megatron.core.ops.sum_rows_triton import num_multiprocessors
from megatron.core.ops.tiles import cdiv

ROWS = gl.constexpr(64)
"""Queries of a warp group."""
QUERIES = gl.constexpr(128)
"""Queries of a tile."""
KEYS = gl.constexpr(128)
"""Keys of a tile."""
_STAGES = {64: 3, 128: 2}
"""Stages of the ring, by the width of heads. With 128 channels a stage takes 64 KiB of shared memory."""
_CACHED = 1 << 24
"""Bytes of keys and values of the heads that programs compute at the same time, so that the cache holds them."""
_CACHED_PACKED = 1 << 26
"""`_CACHED` for packed documents: programs read a part of them at a time."""
BATCH, HEAD, FIRST_QUERY, LAST_TILE, LATE, SEEN, EARLY = (gl.constexpr(place) for place in range(7))
"""Places in `plan`: the tile of queries, the last tile of keys, and how many tiles follow with keys that are too late
for some queries, with keys that all queries see, and with keys that are too early for some queries."""


@gluon.jit
def _place(number, tiles, pairs, at_once):  # type: ignore[no-untyped-def]
    """Returns pair of row and head, and first query of a tile. Tiles that see most keys under a causal mask come first,
    for `at_once` pairs at a time."""
    first = number // (tiles * at_once) * at_once
    inside = number - first * tiles
    width = gl.minimum(at_once, pairs - first)
    return first + inside % width, (tiles - 1 - inside // width) * QUERIES


@gluon.jit
def _reach(  # type: ignore[no-untyped-def]
    m, edges, queries, keys, row_length, query_start, key_start, left, right,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Returns tiles of keys: the first that some queries see, the first and the end of those that all queries see, and
    the end of those that some queries see. There is one tile at least, and its keys are compared if no query sees
    them."""
    behind = gl.minimum(m + QUERIES, queries)
    first, last, whole, whole_end = 0, keys, 0, keys // KEYS
    if HAS_RIGHT:
        last = gl.minimum(last, behind + right)
        whole_end = gl.minimum(whole_end, gl.maximum(m + right + 1, 0) // KEYS)
    if HAS_LEFT:
        first = gl.maximum(0, m - left)
        whole = gl.cdiv(gl.maximum(0, m + QUERIES - 1 - left), KEYS)
    if PACKED:
        first_start = gl.load(edges + query_start + m) - key_start
        last_start = gl.load(edges + query_start + behind - 1) - key_start
        last_end = gl.load(edges + row_length + query_start + behind - 1) - key_start
        first = gl.maximum(first, first_start)
        last = gl.minimum(last, last_end)
        whole = gl.maximum(whole, gl.cdiv(gl.maximum(first_start, 0), KEYS))
        whole_end = gl.where(first_start == last_start, gl.minimum(whole_end, gl.maximum(last_end, 0) // KEYS), 0)
    first = first // KEYS
    last = gl.maximum(gl.cdiv(gl.maximum(last, 0), KEYS), first + 1)
    none = whole_end <= whole
    return first, gl.where(none, first, whole), gl.where(none, first, whole_end), last


@gluon.jit
def _load_tiles(  # type: ignore[no-untyped-def]
    query_tiles, key_tiles, value_tiles, edges, counter, plan, q, k, v, asked, answered, full, empty,
    all_tiles, tiles, pairs, at_once, heads, shared, queries, keys, row_length, query_start, key_start, left, right,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Loads queries, keys and values of one tile of queries after the other. Copies fill rows behind the last query or
    key with zeros."""
    SIZE: gl.constexpr = KEYS * WIDTH * 2
    count, turn = 0, 0
    number = gl.program_id(0)
    while number < all_tiles:
        pair, m = _place(number, tiles, pairs, at_once)
        batch, head = pair // heads, pair % heads
        group = head // shared
        first, whole, whole_end, last = _reach(
            m, edges, queries, keys, row_length, query_start, key_start, left, right, HAS_LEFT, HAS_RIGHT, PACKED
        )
        late = last - 1 - gl.minimum(whole_end, last - 1)
        for half in gl.static_range(2):
            mbarrier.wait(answered.index(half), turn & 1 ^ 1)
        tell(plan, BATCH, batch)
        tell(plan, HEAD, head)
        tell(plan, FIRST_QUERY, m)
        tell(plan, LAST_TILE, last - 1)
        tell(plan, LATE, late)
        tell(plan, SEEN, last - 1 - late - whole)
        tell(plan, EARLY, whole - first)
        for half in gl.static_range(2):
            mbarrier.expect(asked.index(half), ROWS * WIDTH * 2)
            load_bulk(query_tiles, [batch, head, m + half * ROWS, 0], asked.index(half), q.index(half))
        turn += 1
        number = all_tiles
        for n in range(last - first + 1):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), count // STAGES & 1 ^ 1)
            begins, ends = n == 0, n == last - first
            mbarrier.expect(full.index(stage), 2 * SIZE, pred=(begins | ends) == 0)
            mbarrier.expect(full.index(stage), SIZE, pred=begins | ends)
            if n < last - first:
                load_bulk(key_tiles, [batch, group, (last - 1 - n) * KEYS, 0], full.index(stage), k.index(stage))
            if n > 0:
                load_bulk(value_tiles, [batch, group, (last - n) * KEYS, 0], full.index(stage), v.index(stage))
            if n == 0:  # here, because the answer takes a microsecond
                number = gl.num_programs(0) + gl.atomic_add(counter, 1)
            count += 1
    for half in gl.static_range(2):
        mbarrier.wait(answered.index(half), turn & 1 ^ 1)
    tell(plan, FIRST_QUERY, DONE)
    for half in gl.static_range(2):
        mbarrier.arrive(asked.index(half), count=1)


@gluon.jit
def _exp2(x):  # type: ignore[no-untyped-def]
    """Returns 2^x, and 0 instead of numbers below 2^-126. `gl.exp2` takes more instructions, for those."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def round_pairs(x, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns x.to(dtype), two numbers at a time. One at a time, they are moved between halves of registers."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def _softmax(  # type: ignore[no-untyped-def]
    product, top, total, n, low, high, factor, COMPARES_HIGH: gl.constexpr, COMPARES_LOW: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Returns weights, what earlier weights are multiplied by, and the new top and total of the running softmax."""
    if COMPARES_HIGH or COMPARES_LOW:
        # A row is compared with columns, which are constants, and not with positions of keys.
        column = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))[None, :]
        low, high = low - n * KEYS, high - n * KEYS
        if COMPARES_HIGH and COMPARES_LOW:  # one comparison of numbers without sign
            size = gl.maximum(high - low, 0).to(gl.uint32, bitcast=True)[:, None]
            seen = (column - low[:, None]).to(gl.uint32, bitcast=True) < size
        elif COMPARES_HIGH:
            seen = column < high[:, None]
        else:
            seen = column >= low[:, None]
        product = gl.where(seen, product, float("-inf"))
    higher = gl.maximum(top, gl.max(product, 1) * factor)
    weight = _exp2(product * factor - higher[:, None])
    rescale = _exp2(top - higher)
    return weight, rescale, higher, total * rescale + gl.sum(weight, 1)


@gluon.jit
def _load_words(bits, n, queries, SCORES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the words of tile n of keys. `bits` are those of the warp group's first query and of the first keys."""
    block = gl.cdiv(queries, QUERIES) * (QUERIES * 4)
    return load_words(bits + n.to(gl.int64) * block, 4, 1, KEYS, SCORES)


@gluon.jit
def _as_factor(weight, words, dtype: gl.constexpr, DROPS: gl.constexpr, CONTEXT: gl.constexpr):  # type: ignore
    """Returns weights as a factor of the product with values, with 0 for those that dropout does not keep."""
    rounded = round_pairs(weight, dtype)
    if DROPS:
        SCORES: gl.constexpr = weight.type.layout
        rounded = drop_pairs(rounded, words, KEYS, SCORES)
    return gl.convert_layout(rounded, gl.DotOperandLayout(0, CONTEXT, 2))


@gluon.jit
def _add_tile(  # type: ignore[no-untyped-def]
    context, weight, top, total, n, count, low, high, factor, q, k, v, full, empty, bits, queries,
    COMPARES_HIGH: gl.constexpr, COMPARES_LOW: gl.constexpr, DROPS: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, CONTEXT: gl.constexpr,
):  # fmt: skip
    """Adds the values of a tile, whose weights are given, to the context, and computes the weights of tile n."""
    stage, phase = count % STAGES, count // STAGES & 1
    words = 0
    if DROPS:
        words = _load_words(bits, n, queries, SCORES)
    mbarrier.wait(full.index(stage), phase)
    none = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    multiplying = warpgroup_mma(q, k.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    adding = warpgroup_mma(weight, v.index(stage), context, is_async=True)
    product = warpgroup_mma_wait(1, deps=[multiplying])
    weight, rescale, top, total = _softmax(
        product, top, total, n, low, high, factor, COMPARES_HIGH, COMPARES_LOW, SCORES
    )
    # This barrier is complete. The assembler would move the second wait for products before the softmax, but not before
    # a wait for a barrier.
    mbarrier.wait(full.index(stage), phase)
    context, total, rescale = warpgroup_mma_wait(0, deps=[adding, total, rescale])
    mbarrier.arrive(empty.index(stage), count=1)
    context = context * gl.convert_layout(rescale, gl.SliceLayout(1, CONTEXT))[:, None]
    weight = _as_factor(weight, words, v.dtype, DROPS, CONTEXT)
    return context, weight, top, total


@gluon.jit
def _compute_tiles(  # type: ignore[no-untyped-def]
    output_tiles, lse, bits, edges, plan, q, k, v, staging, asked, answered, full, empty,
    heads, queries, keys, row_length, query_start, key_start, left, right, factor, keep_scale,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr, DROPS: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Computes the first (WHICH is 0) or the last ROWS queries of each tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    CONTEXT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    HAS_LOW: gl.constexpr = HAS_LEFT or PACKED
    count, turn = 0, 0
    mbarrier.wait(asked, 0)
    m = ask(plan, FIRST_QUERY)
    while m != DONE:
        # A query sees keys from `low` to before `high`.
        i = m + WHICH * ROWS + gl.arange(0, ROWS, ROW)
        low, high = i * 0, i * 0 + keys
        if HAS_RIGHT:
            high = gl.minimum(high, i + right + 1)
        if HAS_LEFT:
            low = gl.maximum(low, i - left)
        if PACKED:
            start = gl.load(edges + query_start + i, mask=i < queries, other=0)
            end = gl.load(edges + row_length + query_start + i, mask=i < queries, other=0)
            low, high = gl.maximum(low, start - key_start), gl.minimum(high, end - key_start)
        top = gl.full([ROWS], -1.0e30, gl.float32, ROW)  # finite, so that rows which see no key yet give no NaN
        total = gl.zeros([ROWS], gl.float32, ROW)
        context = gl.zeros([ROWS, WIDTH], gl.float32, CONTEXT)
        n = ask(plan, LAST_TILE)
        tile_bits, words = bits, 0
        if DROPS:
            pair = (ask(plan, BATCH) * heads + ask(plan, HEAD)).to(gl.int64)
            rows = gl.cdiv(queries, QUERIES) * QUERIES
            tile_bits = bits + (pair * gl.cdiv(keys, KEYS) * rows + (m + WHICH * ROWS)) * 4
            words = _load_words(tile_bits, n, queries, SCORES)
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        none = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        product = warpgroup_mma(q, k.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1
        weight, _, top, total = _softmax(product, top, total, n, low, high, factor, True, HAS_LOW, SCORES)
        weight = _as_factor(weight, words, v.dtype, DROPS, CONTEXT)
        for _ in range(ask(plan, LATE)):
            n -= 1
            context, weight, top, total = _add_tile(
                context, weight, top, total, n, count, low, high, factor, q, k, v, full, empty, tile_bits, queries,
                True, HAS_LOW, DROPS, STAGES, SCORES, CONTEXT,
            )  # fmt: skip
            count += 1
        for _ in range(ask(plan, SEEN)):
            n -= 1
            context, weight, top, total = _add_tile(
                context, weight, top, total, n, count, low, high, factor, q, k, v, full, empty, tile_bits, queries,
                False, False, DROPS, STAGES, SCORES, CONTEXT,
            )  # fmt: skip
            count += 1
        if HAS_LOW:
            for _ in range(ask(plan, EARLY)):
                n -= 1
                context, weight, top, total = _add_tile(
                    context, weight, top, total, n, count, low, high, factor, q, k, v, full, empty, tile_bits, queries,
                    False, True, DROPS, STAGES, SCORES, CONTEXT,
                )  # fmt: skip
                count += 1
        batch, head, m = ask(plan, BATCH), ask(plan, HEAD), ask(plan, FIRST_QUERY) + WHICH * ROWS
        mbarrier.arrive(answered, count=1)
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        context = warpgroup_mma(weight, v.index(stage), context, is_async=True)
        i = m + gl.arange(0, ROWS, ROW)
        known = gl.maximum(total, 1.0e-37)  # a number below 2^-126 would be one of 64 bits
        sums = gl.where(total > 0.0, (top + gl.log2(known)) * 0.6931471805599453, float("-inf"))
        gl.store(lse + (batch * heads + head).to(gl.int64) * queries + i, sums, mask=i < queries)
        context = warpgroup_mma_wait(0, deps=[context])
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1
        context = context * gl.convert_layout(keep_scale / known, gl.SliceLayout(1, CONTEXT))[:, None]
        tma.store_wait(0)
        staging.store(round_pairs(context, v.dtype))
        fence_async_shared()
        store_bulk(output_tiles, [batch, head, m, 0], staging)
        turn += 1
        mbarrier.wait(asked, turn & 1)
        m = ask(plan, FIRST_QUERY)
    tma.store_wait(0)


_COUNTS = "all_tiles tiles pairs at_once heads shared queries keys row_length query_start key_start left right"


@gluon.jit(do_not_specialize=_COUNTS.split())
def _forward_specialized_kernel(  # type: ignore[no-untyped-def]
    output_tiles, lse, query_tiles, key_tiles, value_tiles, bits, edges, counter, all_tiles, tiles, pairs, at_once,
    heads, shared, queries, keys, row_length, query_start, key_start, left, right, factor, keep_scale,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr, DROPS: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = query_tiles.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(dtype, [2, ROWS, WIDTH], TILE)
    k = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], TILE)
    v = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], TILE)
    staging = gl.allocate_shared_memory(dtype, [2, ROWS, WIDTH], TILE)
    plan = gl.allocate_shared_memory(gl.int32, [7, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    asked = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    answered = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for half in gl.static_range(2):
        mbarrier.init(asked.index(half), count=1)
        mbarrier.init(answered.index(half), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute_tiles, (
                output_tiles, lse, bits, edges, plan, q.index(0), k, v, staging.index(0), asked.index(0),
                answered.index(0), full, empty, heads, queries, keys, row_length, query_start, key_start, left, right,
                factor, keep_scale, HAS_LEFT, HAS_RIGHT, PACKED, DROPS, WIDTH, STAGES, 0,
            )),
            (_compute_tiles, (
                output_tiles, lse, bits, edges, plan, q.index(1), k, v, staging.index(1), asked.index(1),
                answered.index(1), full, empty, heads, queries, keys, row_length, query_start, key_start, left, right,
                factor, keep_scale, HAS_LEFT, HAS_RIGHT, PACKED, DROPS, WIDTH, STAGES, 1,
            )),
            (_load_tiles, (
                query_tiles, key_tiles, value_tiles, edges, counter, plan, q, k, v, asked, answered, full, empty,
                all_tiles, tiles, pairs, at_once, heads, shared, queries, keys, row_length, query_start, key_start,
                left, right, HAS_LEFT, HAS_RIGHT, PACKED, WIDTH, STAGES,
            )),
        ],
        [4, 1],  # warps of the second and the third task; the first runs on the program's own four
        [232, 40] if PACKED or HAS_LEFT else [240, 24],  # registers of their threads
    )  # fmt: skip


def takes(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, scores: Scores, sight: Sight) -> bool:
    """Returns whether the kernel can compute a call of `flash_forward_triton`."""
    plain = sink is None and is_plain_on_hopper(query, key, value, scores, sight)
    return plain and all(begin_at_16_bytes(heads) for heads in (query, key, value))


def forward_specialized(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sight: Sight, bits: Tensor | None, keep_scale: float
) -> tuple[Tensor, Tensor]:
    """Computes `flash_forward_triton` for calls that `takes` accepts. `bits` are `KeepBits.by_query`, and the
    probabilities that are kept are multiplied by `keep_scale`."""
    sq, b, a, width = query.shape
    sk, _, groups, _ = key.shape
    output, lse = query.new_empty(query.shape), query.new_empty(b, a, sq, dtype=torch.float32)
    counter = torch.zeros(1, dtype=torch.int32, device=query.device)
    tiles = cdiv(sq, QUERIES.value)
    cached = _CACHED if sight.edges is None else _CACHED_PACKED
    at_once = a // groups * max(1, cached // (sk * width * 4))
    _forward_specialized_kernel[(min(tiles * b * a, num_multiprocessors(query.device)),)](
        head_tiles(output, ROWS.value), lse, head_tiles(query, ROWS.value),
        head_tiles(key, KEYS.value), head_tiles(value, KEYS.value),
        bits, sight.edges, counter, tiles * b * a, tiles, b * a, at_once, a, a // groups, sq, sk, row_length(sight),
        sight.query_start, sight.key_start, sight.left or 0, sight.right or 0, scale * LOG2_E,
        keep_scale,
        HAS_LEFT=sight.left is not None, HAS_RIGHT=sight.right is not None, PACKED=sight.edges is not None,
        DROPS=bits is not None, WIDTH=width, STAGES=_STAGES[width], num_warps=4,
    )  # fmt: skip
    return output, lse
