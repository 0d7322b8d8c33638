"""The loops of the gated delta rule over chunks. A program computes some columns of the state of one value head.

With S the state before a chunk, G its decay through the chunk, and the factors of `chunk_factors_triton`:

    R = beta (V - READ K S)
    C = T R                                     the corrections
    O = QUERIED Q S + P C
    S <- G S + K^T (WRITTEN C)
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["chunks"])  # one chunk, as a constant, compiles to wrong results with Triton 3.6
def _states_kernel(  # type: ignore[no-untyped-def]
    output, states, corrections, inverse, weights, factors, through,
    mixed, mixed_s, mixed_b, mixed_g, length, chunks, heads, shared, batch, key_width, value_width,
    KEYS: tl.constexpr, VALUES: tl.constexpr, KEEPS_STATES: tl.constexpr,
):  # fmt: skip
    """Computes the outputs, or with KEEPS_STATES the states before each chunk and the corrections."""
    row = tl.program_id(1)
    b, head = row // heads, row % heads
    group, member = head // shared, head % shared
    token, channel = tl.arange(0, 64), tl.arange(0, KEYS)
    column = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    inside, there = channel < key_width, column < value_width
    dtype = mixed.dtype.element_ty
    query_at = mixed + b.to(tl.int64) * mixed_b + group * mixed_g + token[:, None] * mixed_s + channel[None, :]
    key_at = query_at + key_width
    value_at = mixed + b.to(tl.int64) * mixed_b + group * mixed_g + 2 * key_width + member * value_width
    value_at += token[:, None] * mixed_s + column[None, :]
    square_at = row.to(tl.int64) * chunks * 4096 + token[:, None] * 64 + token[None, :]
    factor_at = factors + row.to(tl.int64) * chunks * 256 + token
    output_at = output + ((b * heads + head) * value_width).to(tl.int64) + column[None, :]
    output_at += token[:, None].to(tl.int64) * batch * heads * value_width
    corrections_at = corrections + row.to(tl.int64) * chunks * 64 * value_width
    corrections_at += token[:, None] * value_width + column[None, :]
    states_at = states + row.to(tl.int64) * chunks * key_width * value_width
    states_at += channel[:, None] * value_width + column[None, :]
    state = tl.zeros((KEYS, VALUES), tl.float32)
    for chunk in range(chunks):
        valid = (chunk * 64 + token < length)[:, None]
        key = tl.load(key_at, mask=valid & inside[None, :], other=0.0)
        value = tl.load(value_at, mask=valid & there[None, :], other=0.0)
        solved = tl.load(inverse + square_at)
        beta, read = tl.load(factor_at), tl.load(factor_at + 64)
        written = tl.load(factor_at + 128)
        decay = tl.load(through + row * chunks + chunk)
        narrow = state.to(dtype)
        rest = beta[:, None] * (value.to(tl.float32) - read[:, None] * tl.dot(key, narrow))
        correction = tl.dot(solved, rest.to(dtype))
        if KEEPS_STATES:
            tl.store(states_at, narrow, mask=inside[:, None] & there[None, :])
            tl.store(corrections_at, correction.to(dtype), mask=there[None, :])
            states_at += key_width * value_width
            corrections_at += 64 * value_width
        else:
            query = tl.load(query_at, mask=valid & inside[None, :], other=0.0)
            weight = tl.load(weights + square_at)
            queried = tl.load(factor_at + 192)
            result = queried[:, None] * tl.dot(query, narrow) + tl.dot(weight, correction.to(dtype))
            tl.store(output_at, result.to(dtype), mask=valid & there[None, :])
            output_at += 64 * batch * heads * value_width
        state = decay * state + tl.dot(tl.trans(key), (written[:, None] * correction).to(dtype))
        query_at += 64 * mixed_s
        key_at += 64 * mixed_s
        value_at += 64 * mixed_s
        square_at += 4096
        factor_at += 256


@triton.jit(do_not_specialize=["chunks"])
def _state_gradients_kernel(  # type: ignore[no-untyped-def]
    values_gradient, states_gradient, output_gradient, output_s, output_b, output_v,
    inverse, weights, factors, through,
    mixed, mixed_s, mixed_b, mixed_g, gradient_s, gradient_b, gradient_g,
    length, chunks, heads, shared, key_width, value_width, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Goes from the last chunk to the first. With dS the gradient of the state after a chunk:

    dC = P^T dO + WRITTEN K dS,   dV = beta T^T dC,   dS <- G dS + Q^T (QUERIED dO) - K^T (READ dV)
    """
    row = tl.program_id(1)
    b, head = row // heads, row % heads
    group, member = head // shared, head % shared
    token, channel = tl.arange(0, 64), tl.arange(0, KEYS)
    column = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    inside, there = channel < key_width, column < value_width
    dtype = mixed.dtype.element_ty
    last = chunks.to(tl.int64) - 1
    query_at = mixed + b.to(tl.int64) * mixed_b + group * mixed_g + token[:, None] * mixed_s + channel[None, :]
    query_at += last * 64 * mixed_s
    key_at = query_at + key_width
    values_at = values_gradient + b.to(tl.int64) * gradient_b + group * gradient_g + 2 * key_width
    values_at += member * value_width + token[:, None] * gradient_s + column[None, :] + last * 64 * gradient_s
    output_at = output_gradient + b.to(tl.int64) * output_b + head * output_v + token[:, None] * output_s
    output_at += column[None, :] + last * 64 * output_s
    square_at = (row.to(tl.int64) * chunks + last) * 4096 + token[:, None] * 64 + token[None, :]
    factor_at = factors + (row.to(tl.int64) * chunks + last) * 256 + token
    states_at = states_gradient + (row.to(tl.int64) * chunks + last) * key_width * value_width
    states_at += channel[:, None] * value_width + column[None, :]
    state = tl.zeros((KEYS, VALUES), tl.float32)
    for step in range(chunks):
        chunk = chunks - 1 - step
        valid = (chunk * 64 + token < length)[:, None]
        key = tl.load(key_at, mask=valid & inside[None, :], other=0.0)
        query = tl.load(query_at, mask=valid & inside[None, :], other=0.0)
        output = tl.load(output_at, mask=valid & there[None, :], other=0.0)
        solved, weight = tl.load(inverse + square_at), tl.load(weights + square_at)
        beta, read = tl.load(factor_at), tl.load(factor_at + 64)
        written, queried = tl.load(factor_at + 128), tl.load(factor_at + 192)
        decay = tl.load(through + row * chunks + chunk)
        narrow = state.to(dtype)
        tl.store(states_at, narrow, mask=inside[:, None] & there[None, :])
        correction = written[:, None] * tl.dot(key, narrow) + tl.dot(tl.trans(weight), output)
        value = beta[:, None] * tl.dot(tl.trans(solved), correction.to(dtype))
        tl.store(values_at, value.to(dtype), mask=valid & there[None, :])
        state = decay * state + tl.dot(tl.trans(query), (queried[:, None] * output.to(tl.float32)).to(dtype))
        state -= tl.dot(tl.trans(key), (read[:, None] * value).to(dtype))
        query_at -= 64 * mixed_s
        key_at -= 64 * mixed_s
        values_at -= 64 * gradient_s
        output_at -= 64 * output_s
        square_at -= 4096
        factor_at -= 256
        states_at -= key_width * value_width
