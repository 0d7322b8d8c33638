"""The gradients of the scan of a Mamba-2 layer inside its chunks.

A program has a chunk and the heads of a group, one after the other. The gradient of C B^T is summed over them first and
then multiplied with B and C once. One kernel computes what the tokens that read get, the next one what the tokens that
are read get: together they would need more registers than there are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.ssd.states_triton import Sizes, precision_of
from megatron.core.ops.ssd.steps_triton import ScalarGradients
from megatron.core.ops.sum_rows_triton import num_multiprocessors

_QUERIES_STAGES = 3
_KEYS_STAGES = 2
_WARPS = 4


@triton.jit
def _queries_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    mixed_gradient, parts, products_gradient, pairs_gradient, reads_gradient, skip_parts,
    gradient, mixed, states, sizes, sums, document,
    length, groups, per_group, head_dim, state_dim, count,
    gradient_s, gradient_b, gradient_g, mixed_s, mixed_b, mixed_g, batch, heads_of_program,
    PACKED: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, STATES: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Rows of a pair are the tokens t that read, columns the tokens m that are read. With U = step x and, for m <= t,
    # E = exp(decays between): y = (C B^T E) U + exp(decays until t) C S.
    splits = per_group * PARTS // heads_of_program
    group, split = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits
    row, chunk = tl.program_id(2), tl.program_id(1)
    first, t, p, n = chunk * CHUNK, tl.arange(0, CHUNK), tl.arange(0, WIDTH), tl.arange(0, STATES)
    token = first + t
    far, width = first.to(tl.int64), per_group * head_dim + 2 * state_dim
    x_at = mixed + far * mixed_s + row.to(tl.int64) * mixed_b + group * mixed_g
    dy_at = gradient + far * gradient_s + row.to(tl.int64) * gradient_b + group * gradient_g
    x_s, dy_s = t[:, None] * mixed_s, t[:, None] * gradient_s
    here, there = (token < length)[:, None], (n < state_dim)[None, :]
    b_at = x_at + per_group * head_dim
    b = tl.load(b_at + x_s + n[None, :], mask=here & there, other=0.0)
    c = tl.load(b_at + state_dim + x_s + n[None, :], mask=here & there, other=0.0)
    products = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    pairs, from_before = t[:, None] >= t[None, :], t >= 0
    earlier = (t[:, None] < t[None, :]).to(tl.float32)
    if PACKED:
        number = tl.load(document + token, mask=token < length, other=-1)
        pairs &= number[:, None] == tl.load(document + token, mask=token < length, other=-1)[None, :]
        from_before = number == tl.load(document + tl.maximum(first - 1, 0))
    of_products = tl.zeros((CHUNK, CHUNK), tl.float32)
    start = split * heads_of_program
    for inner in tl.range(start, start + heads_of_program, num_stages=STAGES):
        v = (row * groups + group) * per_group * PARTS + inner
        channel = inner % PARTS * WIDTH + p
        at, inside = inner // PARTS * head_dim, here & (channel < head_dim)[None, :]
        x = tl.load(x_at + at + x_s + channel[None, :], mask=inside, other=0.0)
        dy = tl.load(dy_at + at + dy_s + channel[None, :], mask=inside, other=0.0).to(x.dtype)
        of_head = ((row * groups + group) * per_group + inner // PARTS) * count * CHUNK + first
        until, until_key = tl.load(sums + of_head + t), tl.load(sums + of_head + t)
        decay = tl.where(pairs, tl.exp2(until[:, None] - until_key[None, :]), 0.0)
        w = tl.dot(dy, tl.trans(x), input_precision=PRECISION)
        of_skip = (row * count + chunk) * groups * per_group * PARTS + group * per_group * PARTS + inner
        tl.store(skip_parts + of_skip, tl.sum(tl.sum(tl.where(t[:, None] == t[None, :], w, 0.0), 1), 0))
        w *= decay * tl.load(sizes + of_head + t)[None, :]
        of_products += w
        # The decay of token j is in all pairs of a token before it and one from it on.
        crossing = tl.where(t[:, None] > t[None, :], w * products, 0.0)
        crossing = tl.dot(crossing, earlier, input_precision=PRECISION)
        crossing = tl.sum(tl.where(t[:, None] >= t[None, :], crossing, 0.0), 0)
        tl.store(pairs_gradient + v * count * CHUNK + first + t, crossing)
    dc = tl.zeros((CHUNK, STATES), tl.float32)
    for inner in tl.range(start, start + heads_of_program, num_stages=STAGES):
        v = (row * groups + group) * per_group * PARTS + inner
        channel = inner % PARTS * WIDTH + p
        at, inside = inner // PARTS * head_dim, here & (channel < head_dim)[None, :]
        dy = tl.load(dy_at + at + dy_s + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        state = tl.load(states + (v * count + chunk) * (STATES * WIDTH) + n[:, None] * WIDTH + p[None, :])
        of_head = ((row * groups + group) * per_group + inner // PARTS) * count * CHUNK + first
        reads = tl.where(from_before, tl.exp2(tl.load(sums + of_head + t)), 0.0)
        read = tl.dot(c, state, input_precision=PRECISION)
        tl.store(reads_gradient + v * count * CHUNK + first + t, tl.sum(read * dy, 1) * reads)
        dc = tl.dot((dy * reads[:, None]).to(c.dtype), tl.trans(state), dc, input_precision=PRECISION)
    rounded = of_products.to(c.dtype)
    dc = tl.dot(rounded, b, dc, input_precision=PRECISION)
    at = (((split * tl.num_programs(2) + row) * count + chunk) * groups + group) * (CHUNK * CHUNK)
    tl.store(products_gradient + at + t[:, None] * CHUNK + t[None, :], rounded)
    if SPLIT:
        at = (((split * length + far) * batch + row) * groups + group) * (2 * state_dim) + state_dim
        tl.store(parts + at + t[:, None] * (batch * groups * 2 * state_dim) + n[None, :], dc, mask=here & there)
    else:
        at = mixed_gradient + ((far * batch + row) * groups + group) * width + per_group * head_dim + state_dim
        at += t[:, None] * (batch * groups * width) + n[None, :]
        tl.store(at, dc.to(mixed_gradient.dtype.element_ty), mask=here & there)


@triton.jit
def _keys_kernel(  # type: ignore[no-untyped-def]
    mixed_gradient, parts, products_gradient, sizes_gradient, adds_gradient,
    gradient, mixed, after, sizes, sums, skip, document,
    length, groups, per_group, head_dim, state_dim, count,
    gradient_s, gradient_b, gradient_g, mixed_s, mixed_b, mixed_g, batch, heads_of_program,
    PACKED: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    STATES: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Rows of a pair are the tokens m that are read, columns the tokens t that read.
    splits = per_group * PARTS // heads_of_program
    group, split = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(0) % splits
    row, chunk = tl.program_id(2), tl.program_id(1)
    first, t, p, n = chunk * CHUNK, tl.arange(0, CHUNK), tl.arange(0, WIDTH), tl.arange(0, STATES)
    token = first + t
    far, width = first.to(tl.int64), per_group * head_dim + 2 * state_dim
    x_at = mixed + far * mixed_s + row.to(tl.int64) * mixed_b + group * mixed_g
    dy_at = gradient + far * gradient_s + row.to(tl.int64) * gradient_b + group * gradient_g
    dx_at = mixed_gradient + ((far * batch + row) * groups + group) * width
    x_s, dy_s, dx_s = t[:, None] * mixed_s, t[:, None] * gradient_s, t[:, None] * (batch * groups * width)
    here, there = (token < length)[:, None], (n < state_dim)[None, :]
    b_at = x_at + per_group * head_dim
    b = tl.load(b_at + x_s + n[None, :], mask=here & there, other=0.0)
    c = tl.load(b_at + state_dim + x_s + n[None, :], mask=here & there, other=0.0)
    products = tl.dot(b, tl.trans(c), input_precision=PRECISION)
    pairs, to_end = t[:, None] <= t[None, :], t >= 0
    if PACKED:
        number = tl.load(document + token, mask=token < length, other=-1)
        pairs &= number[:, None] == tl.load(document + token, mask=token < length, other=-1)[None, :]
        to_end = number == tl.load(document + tl.minimum(first + CHUNK, length) - 1)
    db = tl.zeros((CHUNK, STATES), tl.float32)
    start = split * heads_of_program
    for inner in tl.range(start, start + heads_of_program, num_stages=STAGES):
        v = (row * groups + group) * per_group * PARTS + inner
        head = group * per_group + inner // PARTS
        channel = inner % PARTS * WIDTH + p
        at, inside = inner // PARTS * head_dim, here & (channel < head_dim)[None, :]
        x = tl.load(x_at + at + x_s + channel[None, :], mask=inside, other=0.0)
        dy = tl.load(dy_at + at + dy_s + channel[None, :], mask=inside, other=0.0).to(x.dtype)
        ds = tl.load(after + (v * count + chunk) * (STATES * WIDTH) + n[:, None] * WIDTH + p[None, :])
        of_head = (row * groups * per_group + head) * count * CHUNK + first
        until, until_reader = tl.load(sums + of_head + t), tl.load(sums + of_head + t)
        step = tl.load(sizes + of_head + t)
        adds = tl.where(to_end, tl.exp2(tl.load(sums + of_head + CHUNK - 1) - until), 0.0)
        added = (x.to(tl.float32) * (adds * step)[:, None]).to(x.dtype)
        db = tl.dot(added, tl.trans(ds), db, input_precision=PRECISION)
        du = tl.dot(b, ds, input_precision=PRECISION) * adds[:, None]
        of_token = v * count * CHUNK + first + t
        tl.store(adds_gradient + of_token, tl.sum(du * x.to(tl.float32), 1) * step)
        weight = tl.where(pairs, tl.exp2(until_reader[None, :] - until[:, None]), 0.0) * products
        du = tl.dot(weight.to(x.dtype), dy, du, input_precision=PRECISION)
        tl.store(sizes_gradient + of_token, tl.sum(du * x.to(tl.float32), 1))
        dx = du * step[:, None] + tl.load(skip + head).to(tl.float32) * dy.to(tl.float32)
        tl.store(dx_at + at + dx_s + channel[None, :], dx.to(mixed_gradient.dtype.element_ty), mask=inside)
    at = (((split * tl.num_programs(2) + row) * count + chunk) * groups + group) * (CHUNK * CHUNK)
    of_products = tl.load(products_gradient + at + t[:, None] * CHUNK + t[None, :])
    db = tl.dot(tl.trans(of_products), c, db, input_precision=PRECISION)
    if SPLIT:
        at = (((split * length + far) * batch + row) * groups + group) * (2 * state_dim)
        tl.store(parts + at + t[:, None] * (batch * groups * 2 * state_dim) + n[None, :], db, mask=here & there)
    else:
        at = dx_at + per_group * head_dim + dx_s + n[None, :]
        tl.store(at, db.to(mixed_gradient.dtype.element_ty), mask=here & there)


def scan_gradients(
    gradient: Tensor,
    mixed: Tensor,
    states: Tensor,
    after: Tensor,
    steps: Tensor,
    sums: Tensor,
    skip: Tensor,
    document: Tensor | None,
    sizes: Sizes,
) -> tuple[Tensor, ScalarGradients]:
    """Returns the gradients of x, B and C in the shape of `mixed`, and those of each head's scalars. `states` are those
    before each chunk, `after` the gradients of those after each chunk."""
    of_mixed = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
    heads, device = sizes.per_group * sizes.parts, mixed.device
    splits, total = _splits(sizes, heads, num_multiprocessors(device)), sizes.groups * heads
    of_sizes, of_pairs, of_reads, of_adds = (
        torch.empty(sizes.batch, total, steps.shape[2], dtype=torch.float32, device=device) for _ in range(4)
    )
    of_skip = torch.empty(sizes.batch, sizes.count, total, dtype=torch.float32, device=device)
    pairs = splits, sizes.batch, sizes.count, sizes.groups, sizes.chunk, sizes.chunk
    of_products = torch.empty(pairs, dtype=mixed.dtype, device=device)
    parts = None
    if splits > 1:
        parts = torch.empty(splits, *mixed.shape[:3], 2 * sizes.state_dim, dtype=torch.float32, device=device)
    grid = sizes.groups * splits, sizes.count, sizes.batch
    shared = *sizes.for_kernel(), *gradient.stride()[:3], *mixed.stride()[:3], sizes.batch, heads // splits
    settings = {"PACKED": document is not None, "SPLIT": splits > 1, **sizes.tiles()}
    settings |= {"PRECISION": precision_of(mixed.dtype), "num_warps": _WARPS}
    _queries_kernel[grid](
        of_mixed, parts, of_products, of_pairs, of_reads, of_skip,
        gradient, mixed, states, steps, sums, document, *shared, STAGES=_QUERIES_STAGES, **settings,
    )  # fmt: skip
    _keys_kernel[grid](
        of_mixed, parts, of_products, of_sizes, of_adds,
        gradient, mixed, after, steps, sums, skip, document, *shared, STAGES=_KEYS_STAGES, **settings,
    )  # fmt: skip
    if parts is not None:
        of_mixed[..., -2 * sizes.state_dim :].copy_(parts.sum(0))
    return of_mixed, ScalarGradients(of_sizes, of_pairs, of_reads, of_adds, of_skip)


def _splits(sizes: Sizes, heads: int, multiprocessors: int) -> int:
    """Returns how many programs share the heads of a group in a chunk: a divisor of their number, so that there are
    enough programs for a GPU."""
    wanted = 2 * multiprocessors / (sizes.groups * sizes.count * sizes.batch)
    return next(n for n in range(1, heads + 1) if heads % n == 0 and (n >= wanted or n == heads))
