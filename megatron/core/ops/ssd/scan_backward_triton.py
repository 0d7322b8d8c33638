"""The gradients of the scan of a Mamba-2 layer inside its chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.ssd.states_triton import Sizes, precision_of
from megatron.core.ops.sum_rows_triton import num_multiprocessors, sum_rows_triton


@triton.jit
def _scan_backward_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    mixed_gradient, b_parts, c_parts, sizes_gradient, decays_gradient, skip_parts,
    gradient, mixed, states, after, sizes, sums, skip, document,
    length, groups, per_group, head_dim, state_dim, count,
    gradient_s, gradient_b, gradient_g, mixed_s, mixed_b, mixed_g, batch, heads_of_program,
    PACKED: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, STATES: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Rows of a pair are the tokens t that read, columns the tokens m that are read. With U = step x and, for m <= t,
    # E = exp(decays between): y = (C B^T E) U + exp(decays until t) C S. `W` is the gradient of C B^T.
    splits = per_group * PARTS // heads_of_program
    group, row, chunk = (tl.program_id(0) // splits).to(tl.int64), tl.program_id(2), tl.program_id(1)
    split = tl.program_id(0) % splits
    first, t, p, n = chunk * CHUNK, tl.arange(0, CHUNK), tl.arange(0, WIDTH), tl.arange(0, STATES)
    token = first + t
    far = token.to(tl.int64)[:, None]
    x_at = mixed + row.to(tl.int64) * mixed_b + group * mixed_g + far * mixed_s
    dy_at = gradient + row.to(tl.int64) * gradient_b + group * gradient_g + far * gradient_s
    width = per_group * head_dim + 2 * state_dim
    dx_at = mixed_gradient + ((far * batch + row) * groups + group) * width
    here, there = (token < length)[:, None], (n < state_dim)[None, :]
    b_at = x_at + per_group * head_dim + n[None, :]
    b = tl.load(b_at, mask=here & there, other=0.0)
    c = tl.load(b_at + state_dim, mask=here & there, other=0.0)
    products = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    pairs, later = t[:, None] >= t[None, :], t[:, None] > t[None, :]
    earlier = (t[:, None] < t[None, :]).to(c.dtype)
    from_before, to_end, whole = t >= 0, t >= 0, True
    if PACKED:
        number = tl.load(document + token, mask=token < length, other=-1)
        pairs &= number[:, None] == tl.load(document + token, mask=token < length, other=-1)[None, :]
        before, end = (
            tl.load(document + tl.maximum(first - 1, 0)),
            tl.load(document + tl.minimum(first + CHUNK, length) - 1),
        )
        from_before, to_end, whole = number == before, number == end, before == end
    db = tl.zeros((CHUNK, STATES), tl.float32)
    dc = tl.zeros((CHUNK, STATES), tl.float32)
    start = split * heads_of_program
    for inner in tl.range(start, start + heads_of_program, num_stages=STAGES):
        v = group * per_group * PARTS + inner
        head = group * per_group + inner // PARTS
        channel = inner % PARTS * WIDTH + p
        at = inner // PARTS * head_dim + channel[None, :]
        inside = here & (channel < head_dim)[None, :]
        x = tl.load(x_at + at, mask=inside, other=0.0)
        dy = tl.load(dy_at + at, mask=inside, other=0.0).to(x.dtype)
        of_state = ((row * groups * per_group * PARTS + v) * count + chunk) * (STATES * WIDTH)
        of_state += n[:, None] * WIDTH + p[None, :]
        state = tl.load(states + of_state)
        ds = tl.load(after + of_state)
        of_head = (row * groups * per_group + head) * count * CHUNK + first
        until, until_key = tl.load(sums + of_head + t), tl.load(sums + of_head + t)
        last, step, step_key = (
            tl.load(sums + of_head + CHUNK - 1),
            tl.load(sizes + of_head + t),
            tl.load(sizes + of_head + t),
        )
        decay = tl.where(pairs, tl.exp2(until[:, None] - until_key[None, :]), 0.0)
        reads = tl.where(from_before, tl.exp2(until), 0.0)[:, None]
        adds = tl.where(to_end, tl.exp2(last - until), 0.0)[:, None]
        # What is read of the state before the chunk.
        dy_read = (dy.to(tl.float32) * reads).to(x.dtype)
        dc_read = tl.dot(dy_read, tl.trans(state), input_precision=PRECISION)
        from_state = tl.sum(dc_read * c.to(tl.float32), 1)
        dc += dc_read
        # What is added to the state after the chunk.
        du = tl.dot(b, ds, input_precision=PRECISION) * adds
        to_state = tl.sum(du * x.to(tl.float32), 1) * step
        db = tl.dot(
            (x.to(tl.float32) * (adds * step[:, None])).to(x.dtype), tl.trans(ds), db, input_precision=PRECISION
        )
        # Pairs of tokens of the chunk.
        w = tl.dot(dy, tl.trans(x), input_precision=PRECISION) * decay * step_key[None, :]
        du = tl.dot(tl.trans((products * decay).to(x.dtype)), dy, du, input_precision=PRECISION)
        dc = tl.dot(w.to(x.dtype), b, dc, input_precision=PRECISION)
        db = tl.dot(tl.trans(w.to(x.dtype)), c, db, input_precision=PRECISION)
        # The decay of token m is in all pairs of a token before it and one from it on.
        crossing = tl.dot(tl.where(later, w * products, 0.0).to(c.dtype), earlier, input_precision=PRECISION)
        crossing = tl.where(t[:, None] >= t[None, :], crossing + from_state[:, None], to_state[:, None])
        through = tl.sum(tl.sum(state.to(tl.float32) * ds.to(tl.float32), 1), 0) * tl.where(whole, tl.exp2(last), 0.0)
        of_token = (row * groups * per_group * PARTS + v) * count * CHUNK + first + t
        tl.store(decays_gradient + of_token, tl.sum(crossing, 0) + through)
        tl.store(sizes_gradient + of_token, tl.sum(du * x.to(tl.float32), 1))
        factor = tl.load(skip + head).to(tl.float32)
        dx = du * step[:, None] + factor * dy.to(tl.float32)
        tl.store(dx_at + at, dx.to(mixed_gradient.dtype.element_ty), mask=inside)
        of_skip = (row * count + chunk) * groups * per_group * PARTS + v
        tl.store(skip_parts + of_skip, tl.sum(tl.sum(dy.to(tl.float32) * x.to(tl.float32), 1), 0))
    if SPLIT:
        at = (((split * length + far) * batch + row) * groups + group) * state_dim + n[None, :]
        tl.store(b_parts + at, db, mask=here & there)
        tl.store(c_parts + at, dc, mask=here & there)
    else:
        at = dx_at + per_group * head_dim + n[None, :]
        tl.store(at, db.to(mixed_gradient.dtype.element_ty), mask=here & there)
        tl.store(at + state_dim, dc.to(mixed_gradient.dtype.element_ty), mask=here & there)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of x, B and C in the shape of `mixed`; those of step sizes and of the decays' natural
    logarithms, both [b, heads * parts, s]; and that of D. `states` are those before each chunk, `after` the gradients
    of those after each chunk."""
    of_mixed = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
    heads = sizes.per_group * sizes.parts
    splits = _splits(sizes, heads, num_multiprocessors(mixed.device))
    total = sizes.groups * heads
    of_sizes = torch.empty(sizes.batch, total, steps.shape[2], dtype=torch.float32, device=mixed.device)
    of_decays = torch.empty_like(of_sizes)
    skip_parts = torch.empty(sizes.batch * sizes.count, total, dtype=torch.float32, device=mixed.device)
    shared = (splits, *mixed.shape[:3], sizes.state_dim)
    parts = [torch.empty(shared, dtype=torch.float32, device=mixed.device) if splits > 1 else None for _ in "bc"]
    _scan_backward_kernel[(sizes.groups * splits, sizes.count, sizes.batch)](
        of_mixed, *parts, of_sizes, of_decays, skip_parts,
        gradient, mixed, states, after, steps, sums, skip, document,
        *sizes.for_kernel(), *gradient.stride()[:3], *mixed.stride()[:3], sizes.batch, heads // splits,
        PACKED=document is not None, SPLIT=splits > 1, **sizes.tiles(), STAGES=_STAGES,
        PRECISION=precision_of(mixed.dtype), num_warps=_WARPS,
    )  # fmt: skip
    if splits > 1:
        of_b, of_c = of_mixed[..., -2 * sizes.state_dim :].split(sizes.state_dim, -1)
        for target, part in zip((of_b, of_c), parts, strict=True):
            assert part is not None
            target.copy_(part.sum(0))
    of_skip = sum_rows_triton(skip_parts).view(-1, sizes.parts).sum(1).to(skip.dtype)
    return of_mixed, of_sizes, of_decays, of_skip


_STAGES = 1
_WARPS = 8


def _splits(sizes: Sizes, heads: int, multiprocessors: int) -> int:
    """Returns how many programs share the heads of a group in a chunk: a divisor of their number, so that there are
    enough programs for a GPU."""
    wanted = 2 * multiprocessors / (sizes.groups * sizes.count * sizes.batch)
    return next(
        splits for splits in range(1, heads + 1) if heads % splits == 0 and (splits >= wanted or splits == heads)
    )
