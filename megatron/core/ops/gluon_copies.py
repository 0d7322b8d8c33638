"""Copies of tiles in bulk for kernels in Gluon: names of later releases of Triton, what Triton 3.6 has instead, and
heads as tiles."""

from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@builtin
def _add_shared(descriptor, coordinates, source, _semantic=None):  # type: ignore[no-untyped-def]
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)


load_bulk = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""(descriptor, coordinates, barrier, shared): begins to copy a tile of global memory to shared memory."""
store_bulk = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""(descriptor, coordinates, shared): begins to copy shared memory to a tile of global memory."""
add_bulk = getattr(tma, "async_atomic_add", None) or _add_shared
"""(descriptor, coordinates, shared): begins to add shared memory to a tile of global memory."""


def head_tiles(heads: Tensor, rows: int) -> TensorDescriptor:
    """Returns 16-bit heads [s, b, a, d] as [b, a, s, d] in tiles [1, 1, rows, d], swizzled in shared memory."""
    swizzled = NVMMASharedLayout(128, 16, 4)
    return TensorDescriptor.from_tensor(heads.permute(1, 2, 0, 3), [1, 1, rows, heads.shape[3]], swizzled)
