"""The states of Mamba-2 between chunks on a GPU, and their gradients.

A program walks over the chunks of a row with a part of a head's state in float32 in registers, and writes it before
each chunk in the type in which matrix products read it. Its parts do not depend on each other, so there are enough
programs for a GPU without a second pass over chunks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.ops.tiles import cdiv, next_power_of_2


@dataclass(frozen=True)
class Sizes:
    """Sizes of a scan, and the tiles of its kernels. A head wider than a tile is as many heads with equal decays."""

    length: int
    batch: int
    groups: int
    per_group: int
    """Heads of a group."""
    head_dim: int
    state_dim: int
    chunk: int
    """Tokens of a chunk."""

    @property
    def count(self) -> int:
        """Chunks of a row."""
        return cdiv(self.length, self.chunk)

    @property
    def tile(self) -> int:
        """Channels of a head in a tile."""
        return max(16, min(64, next_power_of_2(self.head_dim)))

    @property
    def parts(self) -> int:
        """Tiles of a head."""
        return cdiv(self.head_dim, self.tile)

    @property
    def states(self) -> int:
        """Numbers of B and C in a tile."""
        return max(16, next_power_of_2(self.state_dim))

    def for_kernel(self) -> tuple[int, ...]:
        """Returns the sizes in the order in which kernels take them."""
        return self.length, self.groups, self.per_group, self.head_dim, self.state_dim, self.count

    def tiles(self) -> dict[str, Any]:
        """Returns the tiles in the names of kernels."""
        return {"PARTS": self.parts, "CHUNK": self.chunk, "STATES": self.states, "WIDTH": self.tile}


@triton.jit
def _states_kernel(  # type: ignore[no-untyped-def]  # Triton would evaluate annotations
    states, mixed, sizes, sums, document, length, groups, per_group, head_dim, state_dim, count,
    mixed_s, mixed_b, mixed_g,
    PACKED: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, STATES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    v, row = tl.program_id(1), tl.program_id(2)
    heads, inner = groups * per_group, v % (per_group * PARTS)
    t, p = tl.arange(0, CHUNK), tl.program_id(0) % (WIDTH // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    n = tl.program_id(0) // (WIDTH // COLUMNS) * BLOCK + tl.arange(0, BLOCK)
    channel = inner % PARTS * WIDTH + p
    x_at = mixed + row.to(tl.int64) * mixed_b + (v // (per_group * PARTS)).to(tl.int64) * mixed_g
    b_at = x_at + per_group * head_dim + n
    x_at += inner // PARTS * head_dim + channel
    of_head = (row * heads + v // PARTS).to(tl.int64) * (count * CHUNK)
    target = states + (row * heads * PARTS + v).to(tl.int64) * count * (STATES * WIDTH)
    target += n[:, None] * WIDTH + p[None, :]
    state = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for chunk in tl.range(0, count, num_stages=STAGES):
        tl.store(target, state.to(states.dtype.element_ty))
        first = chunk * CHUNK
        token = first + t
        at = token.to(tl.int64)[:, None] * mixed_s
        here = (token < length)[:, None]
        x = tl.load(x_at[None, :] + at, mask=here & (channel < head_dim)[None, :], other=0.0)
        b = tl.load(b_at[None, :] + at, mask=here & (n < state_dim)[None, :], other=0.0)
        last = tl.load(sums + of_head + first + CHUNK - 1)
        factor = tl.exp2(last - tl.load(sums + of_head + token)) * tl.load(sizes + of_head + token)
        kept = tl.exp2(last)
        if PACKED:
            end = tl.load(document + tl.minimum(first + CHUNK, length) - 1)
            before = tl.load(document + tl.maximum(first - 1, 0))
            factor = tl.where(tl.load(document + token, mask=token < length, other=-1) == end, factor, 0.0)
            kept = tl.where(end == before, kept, 0.0)
        x = (x.to(tl.float32) * factor[:, None]).to(x.dtype)
        state = state * kept + tl.dot(tl.trans(b), x, input_precision=PRECISION)
        target += STATES * WIDTH


@triton.jit
def _state_gradients_kernel(  # type: ignore[no-untyped-def]
    gradients, through, gradient, mixed, states, sums, document, length, groups, per_group, head_dim, state_dim, count,
    gradient_s, gradient_b, gradient_g, mixed_s, mixed_b, mixed_g,
    PACKED: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, STATES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    v, row = tl.program_id(1), tl.program_id(2)
    heads, inner = groups * per_group, v % (per_group * PARTS)
    group = (v // (per_group * PARTS)).to(tl.int64)
    t, p = tl.arange(0, CHUNK), tl.program_id(0) % (WIDTH // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    n = tl.program_id(0) // (WIDTH // COLUMNS) * BLOCK + tl.arange(0, BLOCK)
    channel = inner % PARTS * WIDTH + p
    y_at = gradient + row.to(tl.int64) * gradient_b + group * gradient_g + inner // PARTS * head_dim + channel
    c_at = mixed + row.to(tl.int64) * mixed_b + group * mixed_g + per_group * head_dim + state_dim + n
    of_head = (row * heads + v // PARTS).to(tl.int64) * (count * CHUNK)
    v = (row * heads * PARTS + v).to(tl.int64)
    place = (v * count + count - 1) * (STATES * WIDTH) + n[:, None] * WIDTH + p[None, :]
    state = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for done in tl.range(0, count, num_stages=STAGES):
        tl.store(gradients + place, state.to(gradients.dtype.element_ty))
        before_chunk = tl.load(states + place).to(tl.float32)
        chunk = count - 1 - done
        first = chunk * CHUNK
        token = first + t
        here = (token < length)[:, None]
        y = tl.load(
            y_at[None, :] + token.to(tl.int64)[:, None] * gradient_s,
            mask=here & (channel < head_dim)[None, :], other=0.0,
        )  # fmt: skip
        c = tl.load(
            c_at[None, :] + token.to(tl.int64)[:, None] * mixed_s, mask=here & (n < state_dim)[None, :], other=0.0
        )
        factor = tl.exp2(tl.load(sums + of_head + token))
        kept = tl.exp2(tl.load(sums + of_head + first + CHUNK - 1))
        if PACKED:
            end = tl.load(document + tl.minimum(first + CHUNK, length) - 1)
            before = tl.load(document + tl.maximum(first - 1, 0))
            factor = tl.where(tl.load(document + token, mask=token < length, other=-1) == before, factor, 0.0)
            kept = tl.where(end == before, kept, 0.0)
        passed = kept * tl.sum(tl.sum(before_chunk * state, 1), 0)
        tl.store(through + (v * count + chunk) * tl.num_programs(0) + tl.program_id(0), passed)
        y = (y.to(tl.float32) * factor[:, None]).to(c.dtype)
        state = state * kept + tl.dot(tl.trans(c), y, input_precision=PRECISION)
        place -= STATES * WIDTH


def states_before_chunks(
    mixed: Tensor, steps: Tensor, sums: Tensor, document: Tensor | None, sizes: Sizes, dtype: torch.dtype
) -> Tensor:
    """Returns the state before each chunk, [b, heads * parts, chunks, n, p] in a type, filled up with zeros to whole
    tiles. `mixed` [s, b, g, ...] has x, B and C of each group."""
    states = _new_states(mixed, sizes, dtype)
    blocks, settings = _blocks(sizes, mixed.dtype)
    _states_kernel[(blocks, states.shape[1], sizes.batch)](
        states, mixed, steps, sums, document, *sizes.for_kernel(), *mixed.stride()[:3],
        PACKED=document is not None, **sizes.tiles(), **settings,
    )  # fmt: skip
    return states


def gradients_after_chunks(
    gradient: Tensor, mixed: Tensor, states: Tensor, sums: Tensor, document: Tensor | None, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the state after each chunk in the shape and type of the states before them, from that of
    the scan's result, [s, b, g, channels]. And the gradient of the logarithm of a chunk's decay from the states that it
    passes on, in parts, [b, heads * parts, chunks, parts]."""
    gradients, (blocks, settings) = torch.empty_like(states), _blocks(sizes, mixed.dtype)
    through = torch.empty(*states.shape[:3], blocks, dtype=torch.float32, device=states.device)
    _state_gradients_kernel[(blocks, states.shape[1], sizes.batch)](
        gradients, through, gradient, mixed, states, sums, document,
        *sizes.for_kernel(), *gradient.stride()[:3], *mixed.stride()[:3],
        PACKED=document is not None, **sizes.tiles(), **settings,
    )  # fmt: skip
    return gradients, through


_BLOCK = 64
"""Numbers of B or C of a program."""
_COLUMNS = 64
"""Channels of a program."""
_STAGES = 3
_WARPS = 4


def _blocks(sizes: Sizes, dtype: torch.dtype) -> tuple[int, dict[str, Any]]:
    """Returns how many programs share a state, and their settings."""
    block, columns = min(_BLOCK, sizes.states), min(_COLUMNS, sizes.tile)
    settings = {"BLOCK": block, "COLUMNS": columns, "STAGES": _STAGES, "PRECISION": precision_of(dtype)}
    return sizes.states // block * (sizes.tile // columns), {**settings, "num_warps": _WARPS}


def _new_states(mixed: Tensor, sizes: Sizes, dtype: torch.dtype) -> Tensor:
    heads = sizes.groups * sizes.per_group * sizes.parts
    return torch.empty(sizes.batch, heads, sizes.count, sizes.states, sizes.tile, dtype=dtype, device=mixed.device)


def precision_of(dtype: torch.dtype) -> str:
    """Returns the precision of products of numbers of a type: that of the type."""
    return "ieee" if dtype is torch.float32 else "tf32"
