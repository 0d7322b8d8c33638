"""Gradients of the gated delta rule for each chunk, from the states S before the chunk, their gradients dS after it,
the corrections C and the gradients dV of the values.

With E = D dO C^T / (|q_i| |k_j| sqrt(dk)), N = D dV C^T / (|k_i| |k_j|) for j < i, and uq, uk the gradients of q and k
at constant lengths:

    uq = QUERIED dO S^T + E K
    uk = WRITTEN C dS^T - READ dV S^T + E^T Q - (N + N^T) K
    dq = uq - q (q.uq) / |q|^2,   dk = uk - k (k.uk) / |k|^2
    d strength = dV.C (1 - beta) / beta

The last line: (I + L) C = R, where L and R are beta times something, and dV = beta dR. The gradient of beta is
dR.R / beta - dR.(L C) / beta = dR.C / beta.

The sum g of log decays until a token is in E and N with a plus for the row and a minus for the column, and in the
products with a state. A log decay is in the sums from its token on, so its gradient is a sum over its token and those
after it. What is written to a state is the exception. With w_t = k_t.(WRITTEN C dS^T)_t, the gradient of the log decay
of token t through the state after the chunk is G <S, dS> + the sum of w_j for j < t. This equals <state after the
chunk, dS> minus the sum of w_j for j >= t, but in that difference the rounded products of a whole chunk cancel.
"""

import triton
import triton.language as tl

from megatron.core.ops.delta_rule.chunk_factors_triton import decays_between, decays_of_chunk, document_numbers_of_chunk


@triton.jit
def _pair_gradients_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    weights, inverse, changes, strength_gradient,
    corrections, values_gradient, gradient_s, gradient_b, gradient_g, output_gradient, output_s, output_b, output_v,
    lengths, mixed, mixed_s, mixed_b, mixed_g, fading, fading_s, fading_b, fading_g, fading_n,
    strength, strength_s, strength_b, strength_g, strength_n, log_rate, bias, document,
    length, batch, groups, shared, key_width, value_width,
    HAS_DOCUMENTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Writes E over `weights`, -(N + N^T) over `inverse`, the gradient of g through both, and that of the strengths."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    chunks, heads = tl.num_programs(0), groups * shared
    b, head = row // heads, row % heads
    group, member = head // shared, head % shared
    token, channel = tl.arange(0, 64), tl.arange(0, KEYS)
    valid = chunk * 64 + token < length
    first = (chunk * 64).to(tl.int64)
    place = row.to(tl.int64) * chunks + chunk
    corrections += place * 64 * value_width
    output_gradient += first * output_s + b.to(tl.int64) * output_b + head * output_v
    values_gradient += first * gradient_s + b.to(tl.int64) * gradient_b + group * gradient_g
    values_gradient += 2 * key_width + member * value_width
    read, system = tl.zeros((64, 64), tl.float32), tl.zeros((64, 64), tl.float32)
    agreement = tl.zeros((64,), tl.float32)
    for begin in range(0, value_width, VALUES):
        column = begin + tl.arange(0, VALUES)[None, :]
        there = column < value_width
        output_at, values_at = token[:, None] * output_s + column, token[:, None] * gradient_s + column
        output = tl.load(output_gradient + output_at, mask=valid[:, None] & there, other=0.0)
        value = tl.load(values_gradient + values_at, mask=valid[:, None] & there, other=0.0)
        correction = tl.load(corrections + token[:, None] * value_width + column, mask=there, other=0.0)
        read = tl.dot(output, tl.trans(correction), read)
        system = tl.dot(value, tl.trans(correction), system)
        agreement += tl.sum(value.to(tl.float32) * correction.to(tl.float32), 1)
    at = mixed + first * mixed_s + b.to(tl.int64) * mixed_b + group * mixed_g
    at += token[:, None] * mixed_s + channel[None, :]
    present = valid[:, None] & (channel < key_width)[None, :]
    query = tl.load(at, mask=present, other=0.0)
    key = tl.load(at + key_width, mask=present, other=0.0)
    lengths += ((b * groups + group).to(tl.int64) * chunks + chunk) * 128
    query_length, key_length = tl.load(lengths + token), tl.load(lengths + 64 + token)
    fading += first * fading_s + b.to(tl.int64) * fading_b + group * fading_g + member * fading_n
    sums, _, _ = decays_of_chunk(fading, fading_s, log_rate + head, bias + head, valid)
    number, _ = document_numbers_of_chunk(document, chunk, length, HAS_DOCUMENTS)
    between = decays_between(sums, number) * key_length[None, :]
    read *= between * query_length[:, None]
    system = tl.where(token[:, None] > token[None, :], -system * between * key_length[:, None], 0.0)
    square = place * 4096 + token[:, None] * 64 + token[None, :]
    tl.store(weights + square, read.to(weights.dtype.element_ty))
    pairs = read * tl.dot(query, tl.trans(key)) + system * tl.dot(key, tl.trans(key))
    pairs = tl.where(token[:, None] > token[None, :], pairs, 0.0)
    system += tl.trans(system)
    tl.store(inverse + square, system.to(inverse.dtype.element_ty))
    tl.store(changes + place * 64 + token, tl.sum(pairs, 1))
    tl.store(changes + (tl.num_programs(1).to(tl.int64) * chunks + place) * 64 + token, tl.sum(pairs, 0))
    strength += first * strength_s + b.to(tl.int64) * strength_b + group * strength_g + member * strength_n
    x = tl.load(strength + token.to(tl.int64) * strength_s, mask=valid, other=0.0).to(tl.float32)
    of_strength = agreement * tl.exp(tl.minimum(-x, 60.0))  # (1 - beta) / beta = exp(-x)
    strength_gradient += ((first + token) * batch + b) * heads + head
    tl.store(strength_gradient, of_strength.to(strength_gradient.dtype.element_ty), mask=valid)


@triton.jit
def _query_gradients_kernel(  # type: ignore[no-untyped-def]
    mixed_gradient, gradient_s, gradient_b, gradient_g, changes, states, output_gradient, output_s, output_b, output_v,
    weights, factors, lengths, mixed, mixed_s, mixed_b, mixed_g,
    length, groups, shared, key_width, value_width, scale, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Adds up the gradients of a key head's query over its value heads, and writes those of g through what queries read
    from states to the third part of `changes`."""
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    b, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    rows = tl.num_programs(1).to(tl.int64) * shared
    token, channel = tl.arange(0, 64), tl.arange(0, KEYS)
    valid = (chunk * 64 + token < length)[:, None]
    inside = (channel < key_width)[:, None]
    first = (chunk * 64).to(tl.int64)
    present = valid & (channel < key_width)[None, :]
    at = mixed + first * mixed_s + b.to(tl.int64) * mixed_b + group * mixed_g
    at += token[:, None] * mixed_s + channel[None, :]
    total = tl.zeros((64, KEYS), tl.float32)
    for member in range(shared):
        head = group * shared + member
        place = (b * groups * shared + head).to(tl.int64) * chunks + chunk
        output_at = output_gradient + first * output_s + b.to(tl.int64) * output_b + head * output_v
        states_at = states + place * key_width * value_width
        part = tl.zeros((64, KEYS), tl.float32)
        for begin in range(0, value_width, VALUES):
            column = begin + tl.arange(0, VALUES)[None, :]
            there = column < value_width
            output = tl.load(output_at + token[:, None] * output_s + column, mask=valid & there, other=0.0)
            state = tl.load(states_at + channel[:, None] * value_width + column, mask=inside & there, other=0.0)
            part = tl.dot(output, tl.trans(state), part)
        part *= tl.load(factors + place * 256 + 192 + token)[:, None]
        query = tl.load(at, mask=present, other=0.0).to(tl.float32)
        tl.store(changes + (2 * rows * chunks + place) * 64 + token, tl.sum(part * query, 1))
        total += part
        weight = tl.load(weights + place * 4096 + token[:, None] * 64 + token[None, :])
        total = tl.dot(weight, tl.load(at + key_width, mask=present, other=0.0), total)
    inverse = tl.load(lengths + (tl.program_id(1).to(tl.int64) * chunks + chunk) * 128 + token) / scale
    query = tl.load(at, mask=present, other=0.0).to(tl.float32)
    total -= query * (inverse * inverse * tl.sum(query * total, 1))[:, None]
    to = mixed_gradient + first * gradient_s + b.to(tl.int64) * gradient_b + group * gradient_g
    to += token[:, None] * gradient_s + channel[None, :]
    tl.store(to, total.to(mixed.dtype.element_ty), mask=present)


@triton.jit
def _key_gradients_kernel(  # type: ignore[no-untyped-def]
    mixed_gradient, gradient_s, gradient_b, gradient_g, changes, states, states_gradient, corrections,
    weights, inverse, factors, through, lengths, mixed, mixed_s, mixed_b, mixed_g,
    length, groups, shared, key_width, value_width, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Adds up the gradients of a key head's key over its value heads. Writes those of g through what corrections read
    from states, with the other sign, to the fourth part of `changes`, and those of log decays through the state after
    the chunk to the fifth."""
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    b, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    rows = tl.num_programs(1).to(tl.int64) * shared
    token, channel = tl.arange(0, 64), tl.arange(0, KEYS)
    valid = (chunk * 64 + token < length)[:, None]
    inside = (channel < key_width)[:, None]
    first = (chunk * 64).to(tl.int64)
    present = valid & (channel < key_width)[None, :]
    at = mixed + first * mixed_s + b.to(tl.int64) * mixed_b + group * mixed_g
    at += token[:, None] * mixed_s + channel[None, :]
    mixed_gradient += first * gradient_s + b.to(tl.int64) * gradient_b + group * gradient_g
    total = tl.zeros((64, KEYS), tl.float32)
    for member in range(shared):
        place = (b * groups * shared + group * shared + member).to(tl.int64) * chunks + chunk
        values_at = mixed_gradient + 2 * key_width + member * value_width
        corrections_at = corrections + place * 64 * value_width
        states_at = states + place * key_width * value_width
        after_at = states_gradient + place * key_width * value_width
        carried = tl.zeros((KEYS,), tl.float32)
        written = tl.zeros((64, KEYS), tl.float32)
        for begin in range(0, value_width, VALUES):
            column = begin + tl.arange(0, VALUES)[None, :]
            there = column < value_width
            to = channel[:, None] * value_width + column
            correction = tl.load(corrections_at + token[:, None] * value_width + column, mask=there, other=0.0)
            after = tl.load(after_at + to, mask=inside & there, other=0.0)
            written = tl.dot(correction, tl.trans(after), written)
            state = tl.load(states_at + to, mask=inside & there, other=0.0)
            carried += tl.sum(state.to(tl.float32) * after.to(tl.float32), 1)
        written *= tl.load(factors + place * 256 + 128 + token)[:, None]
        read = tl.zeros((64, KEYS), tl.float32)
        for begin in range(0, value_width, VALUES):
            column = begin + tl.arange(0, VALUES)[None, :]
            there = column < value_width
            to = channel[:, None] * value_width + column
            value = tl.load(values_at + token[:, None] * gradient_s + column, mask=valid & there, other=0.0)
            state = tl.load(states_at + to, mask=inside & there, other=0.0)
            read = tl.dot(value, tl.trans(state), read)
        read *= tl.load(factors + place * 256 + 64 + token)[:, None]
        key = tl.load(at + key_width, mask=present, other=0.0)
        changes_at = changes + (3 * rows * chunks + place) * 64 + token
        tl.store(changes_at, tl.sum(read * key.to(tl.float32), 1))
        change = tl.sum(written * key.to(tl.float32), 1)
        change = tl.cumsum(change, 0) - change + tl.load(through + place) * tl.sum(carried, 0)
        tl.store(changes_at + rows * chunks * 64, change)
        total += written - read
        square = place * 4096 + token[:, None] * 64 + token[None, :]
        # The selections keep the products apart: eight warps compute a product of 64 rows twice if another adds to it.
        query = tl.load(at, mask=present, other=0.0)
        total += tl.where(valid, tl.dot(tl.trans(tl.load(weights + square)), query), 0.0)
        total += tl.where(valid, tl.dot(tl.load(inverse + square), key), 0.0)
    lengths += (tl.program_id(1).to(tl.int64) * chunks + chunk) * 128 + 64
    inverse_length = tl.load(lengths + token)
    key = tl.load(at + key_width, mask=present, other=0.0).to(tl.float32)
    total -= key * (inverse_length * inverse_length * tl.sum(key * total, 1))[:, None]
    to = mixed_gradient + key_width + token[:, None] * gradient_s + channel[None, :]
    tl.store(to, total.to(mixed.dtype.element_ty), mask=present)


@triton.jit
def _decay_gradients_kernel(  # type: ignore[no-untyped-def]
    fading_gradient, parts, changes, fading, fading_s, fading_b, fading_g, fading_n, log_rate, bias, document,
    length, batch, heads, shared, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Gradients of `fading`, and each chunk's part of those of `log_rate` and `bias`, from the gradients of g."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    chunks = tl.num_programs(0)
    b, head = row // heads, row % heads
    token = tl.arange(0, 64)
    valid = chunk * 64 + token < length
    first = (chunk * 64).to(tl.int64)
    fading += first * fading_s + b.to(tl.int64) * fading_b + head // shared * fading_g + head % shared * fading_n
    _, log_decay, x = decays_of_chunk(fading, fading_s, log_rate + head, bias + head, valid)
    number, _ = document_numbers_of_chunk(document, chunk, length, HAS_DOCUMENTS)
    at = changes + (row.to(tl.int64) * chunks + chunk) * 64 + token
    part = tl.num_programs(1).to(tl.int64) * chunks * 64
    change = tl.load(at) - tl.load(at + part) + tl.load(at + 2 * part) - tl.load(at + 3 * part)
    follows = (token[:, None] >= token[None, :]) & (number[:, None] == number[None, :])
    change = tl.sum(tl.where(follows, change[:, None], 0.0), 0) + tl.load(at + 4 * part)
    if HAS_DOCUMENTS:
        before = tl.load(document + tl.maximum(tl.minimum(chunk * 64 + token, length - 1) - 1, 0)).to(tl.int32)
        change = tl.where(number == before, change, 0.0)
    change = tl.where(valid & (chunk * 64 + token > 0), change, 0.0)  # no state fades at the first token
    of_fading = -change * tl.exp(tl.load(log_rate + head).to(tl.float32)) * tl.sigmoid(x)
    fading_gradient += ((first + token) * batch + b) * heads + head
    tl.store(fading_gradient, of_fading.to(fading_gradient.dtype.element_ty), mask=valid)
    parts += ((chunk * batch + b) * 2).to(tl.int64) * heads + head
    tl.store(parts, tl.sum(change * log_decay, 0))
    tl.store(parts + heads, tl.sum(of_fading, 0))
