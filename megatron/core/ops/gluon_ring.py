"""Rings of stages in kernels in Gluon with specialised warps: one warp loads blocks, and warp groups compute with them.

Barriers order the tasks:

- `full` of a stage: its block is there, and with the first block of a tile `plan`, which says which tile it is. The
  copy engine completes it.
- `empty` of a stage: it may be overwritten. All warp groups arrive when they no longer read it.

A barrier alternates between phases 0 and 1, and a wait names the phase whose end it waits for. A new barrier is in
phase 0, and the phase before it counts as ended: warp groups start with phase 0 of `full`, the loading warp with phase
1 of `empty`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

BAND = gl.constexpr(8)
"""Rows of tiles that are computed together, so that neighbouring programs share inputs in the cache."""
DONE = gl.constexpr(-1)
"""First number of a plan that says that no tile is left."""


@gluon.jit
def ring_barriers(STAGES: gl.constexpr, WARP_GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns `full` and `empty` of a ring, from which WARP_GROUPS warp groups read."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=WARP_GROUPS)
    fence_async_shared()
    return full, empty


@gluon.jit
def tell(plan, place, value):  # type: ignore[no-untyped-def]
    """Writes a number of the plan; called by the loading warp."""
    plan.index(place).store(gl.full([1], value, plan.dtype, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def ask(plan, place):  # type: ignore[no-untyped-def]
    """Returns a number of the plan; called by a warp group."""
    return gl.sum(plan.index(place).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def tell_done(plan, full, empty, count, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Says that no tile is left, in the stage after the `count` that were loaded; called by the loading warp."""
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), count // STAGES & 1 ^ 1)
    tell(plan, stage, DONE)
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def place_in_band(tile, down, across):  # type: ignore[no-untyped-def]
    """Returns the row and the column of a tile among down x across tiles. They are in order of bands of BAND rows, and
    of columns within a band."""
    band = tile // (BAND * across)
    height = gl.minimum(down - band * BAND, BAND)
    inside = tile % (BAND * across)
    return band * BAND + inside % height, inside // height
