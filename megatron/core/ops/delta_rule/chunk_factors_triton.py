"""Factors of each chunk of 64 tokens for the kernels of the gated delta rule.

With q, k as they come, 1/|q|, 1/|k| their inverse lengths and g the sum of log decays from the chunk's first token:

    D_ij = exp(g_i - g_j) for j <= i of one document, else 0
    weights  P = D_ij q_i.k_j / (|q_i| |k_j| sqrt(dk))
    inverse  T = (I + L)^-1,  L = beta_i D_ij k_i.k_j / (|k_i| |k_j|) for j < i
"""

import triton
import triton.language as tl

CHUNK = 64
"""Tokens of a chunk."""
FACTORS = 4
"""Numbers of each token and value head: beta; READ, the decay since the chunk's start / |k|; WRITTEN, the decay until
the chunk's end / |k|; QUERIED, the decay since the chunk's start / (|q| sqrt(dk))."""


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    """Returns log(1 + exp(x))."""
    e = tl.exp(tl.minimum(x, 20.0))
    return tl.where(x > 20.0, x, tl.where(e < 1e-3, e - 0.5 * e * e, tl.log(1.0 + e)))


@triton.jit
def decays_of_chunk(fading, stride, log_rate, bias, valid):  # type: ignore[no-untyped-def]
    """Returns the sums of log decays [64], the log decays, and the arguments of their softplus."""
    token = tl.arange(0, 64)
    x = tl.load(fading + token.to(tl.int64) * stride, mask=valid, other=0.0).to(tl.float32)
    x += tl.load(bias).to(tl.float32)
    log_decay = tl.where(valid, -tl.exp(tl.load(log_rate).to(tl.float32)) * softplus(x), 0.0)
    return tl.cumsum(log_decay, 0), log_decay, x


@triton.jit
def decays_between(sums, number):  # type: ignore[no-untyped-def]
    """Returns D [64, 64] for the documents' numbers [64] of the tokens."""
    token = tl.arange(0, 64)
    visible = (token[:, None] >= token[None, :]) & (number[:, None] == number[None, :])
    return tl.exp(tl.where(visible, sums[:, None] - sums[None, :], float("-inf")))


@triton.jit
def document_numbers_of_chunk(document, chunk, length, HAS_DOCUMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the documents' numbers of a chunk's tokens, and whether each is that of the token before the chunk."""
    token = tl.arange(0, 64)
    if HAS_DOCUMENTS:
        number = tl.load(document + tl.minimum(chunk * 64 + token, length - 1)).to(tl.int32)
        before = tl.load(document + tl.maximum(chunk * 64 - 1, 0)).to(tl.int32)
        goes_on = number == before
    else:
        number = tl.zeros((64,), tl.int32)
        goes_on = token >= 0
    return number, goes_on


@triton.jit
def _joined(inverse, lower, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the inverse of blocks of twice SIZE rows from those of SIZE rows."""
    row = tl.arange(0, 64)[:, None]
    column = tl.arange(0, 64)[None, :]
    joins = (row // (2 * SIZE) == column // (2 * SIZE)) & (row // SIZE != column // SIZE)
    left = tl.dot(inverse, tl.where(joins, lower, 0.0), input_precision="tf32")
    return inverse - tl.dot(left, inverse, input_precision="tf32")


@triton.jit
def inverse_of_unit_triangle(lower):  # type: ignore[no-untyped-def]
    """Returns (I + L)^-1 for a strictly lower triangular L [64, 64]: of blocks of two rows, then of pairs of blocks,
    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]. The products have 10 bits; results are stored with 8."""
    row = tl.arange(0, 64)[:, None]
    column = tl.arange(0, 64)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, lower, 0.0)
    for level in tl.static_range(1, 6):
        inverse = _joined(inverse, lower, 1 << level)
    return inverse


@triton.jit
def _chunk_factors_kernel(  # type: ignore[no-untyped-def]
    inverse, weights, factors, through, lengths,
    mixed, mixed_s, mixed_b, mixed_g, fading, fading_s, fading_b, fading_g, fading_n,
    strength, strength_s, strength_b, strength_g, strength_n, log_rate, bias, document,
    length, heads, shared, key_width, scale, epsilon,
    HAS_DOCUMENTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    chunks = tl.num_programs(0)
    b, head = row // heads, row % heads
    group, member = head // shared, head % shared
    token, channel = tl.arange(0, 64), tl.arange(0, WIDTH)
    valid = chunk * 64 + token < length
    first = (chunk * 64).to(tl.int64)
    at = mixed + first * mixed_s + b * mixed_b + group * mixed_g + token[:, None] * mixed_s + channel[None, :]
    there = valid[:, None] & (channel < key_width)[None, :]
    query = tl.load(at, mask=there, other=0.0)
    key = tl.load(at + key_width, mask=there, other=0.0)
    wide_query, wide_key = query.to(tl.float32), key.to(tl.float32)
    query_length = tl.where(valid, scale * tl.rsqrt(tl.sum(wide_query * wide_query, 1) + epsilon), 0.0)
    key_length = tl.where(valid, tl.rsqrt(tl.sum(wide_key * wide_key, 1) + epsilon), 0.0)
    fading += first * fading_s + b * fading_b + group * fading_g + member * fading_n
    sums, _, _ = decays_of_chunk(fading, fading_s, log_rate + head, bias + head, valid)
    strength += first * strength_s + b * strength_b + group * strength_g + member * strength_n
    x = tl.load(strength + token.to(tl.int64) * strength_s, mask=valid, other=0.0).to(tl.float32)
    beta = tl.where(valid, tl.sigmoid(x), 0.0)
    number, goes_on = document_numbers_of_chunk(document, chunk, length, HAS_DOCUMENTS)
    total = tl.sum(tl.where(token == 63, sums, 0.0), 0)
    is_last = token >= 0
    if HAS_DOCUMENTS:
        is_last = number == tl.sum(tl.where(token == 63, number, 0), 0)
    since = tl.where(goes_on, tl.exp(sums), 0.0)
    until = tl.where(is_last, tl.exp(total - sums), 0.0)
    place = (row.to(tl.int64) * chunks + chunk) * 64
    out = factors + place * 4 + token
    tl.store(out, beta)
    tl.store(out + 64, since * key_length)
    tl.store(out + 128, until * key_length)
    tl.store(out + 192, since * query_length)
    tl.store(through + row * chunks + chunk, tl.sum(tl.where(token == 63, since, 0.0), 0))
    if member == 0:
        to = lengths + ((b * (heads // shared) + group).to(tl.int64) * chunks + chunk) * 128 + token
        tl.store(to, query_length)
        tl.store(to + 64, key_length)
    between = decays_between(sums, number)
    square = place * 64 + token[:, None] * 64 + token[None, :]
    read = tl.dot(query, tl.trans(key)) * between * query_length[:, None] * key_length[None, :]
    tl.store(weights + square, read.to(weights.dtype.element_ty))
    similar = tl.dot(key, tl.trans(key)) * between * (beta * key_length)[:, None] * key_length[None, :]
    lower = tl.where(token[:, None] > token[None, :], similar, 0.0)
    solved = inverse_of_unit_triangle(lower)
    tl.store(inverse + square, solved.to(inverse.dtype.element_ty))
