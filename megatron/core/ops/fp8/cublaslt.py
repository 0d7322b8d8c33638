"""An fp8 product that cuBLASLt adds to a float32 matrix. torch has fp8 products, but none that accumulates: a weight
gradient would be written, read again and added, which takes four times the bytes.

cuBLASLt is the library that torch loads. Its matrices are column-major, so total^T = right left^T + total^T is computed
from the row-major matrices as they lie in memory.
"""

import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_WORKSPACE = 32 * 2**20
"""Bytes of a GPU's memory for intermediate results; enough for all kernels on Hopper."""
_LARGEST_ALIGNMENT = 256

# Values of the enums in cublasLt.h, cublas_api.h and library_types.h.
_FLOAT32 = 0
_FP8 = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_32F = 68
_TRANSPOSED = 1
_DESC_TRANSA, _DESC_A_SCALE_POINTER, _DESC_B_SCALE_POINTER = 3, 17, 18
_PREFERENCE_WORKSPACE = 1
_PREFERENCE_ALIGNMENTS = (5, 6, 7, 8)
"""Alignments of A, B, C and D, in the preference."""

_FUNCTIONS: dict[str, tuple[object, ...]] = {
    "MatmulDescCreate": (ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    "MatmulDescSetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t),
    "MatrixLayoutCreate": (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "MatmulPreferenceCreate": (ctypes.c_void_p,),
    "MatmulPreferenceSetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t),
    "MatmulPreferenceDestroy": (ctypes.c_void_p,),
    "MatmulAlgoGetHeuristic": (*[ctypes.c_void_p] * 7, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
    "Matmul": (*[ctypes.c_void_p] * 14, ctypes.c_size_t, ctypes.c_void_p),
}
"""Functions of cuBLASLt with their arguments; all return a status."""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class _Problem:
    """The properties that determine the algorithm of a product: left [m, k], right [n, k], total [m, n]."""

    m: int
    n: int
    k: int
    left: torch.dtype
    right: torch.dtype
    alignments: tuple[int, ...]
    """Alignments in bytes of cuBLASLt's A, B, C and D: right, left, and total twice."""
    device: int | None


@dataclass(frozen=True)
class _Plan:
    """Descriptors of a problem and the algorithm that cuBLASLt recommends."""

    operation: ctypes.c_void_p
    right: ctypes.c_void_p
    left: ctypes.c_void_p
    total: ctypes.c_void_p
    heuristic: _Heuristic


def is_available() -> bool:
    """Whether the library of torch's CUDA version can be called."""
    return _library() is not None


def accumulate_product(total: Tensor, left: Tensor, right: Tensor, left_factor: Tensor, right_factor: Tensor) -> bool:
    """Adds left right^T times both factors to `total`: fp8 [m, k] and [n, k] into float32 [m, n], all contiguous on one
    GPU; factors are float32 scalars there. Partial sums keep float32's precision. Returns False, without a change, if
    cuBLASLt has no kernel for the problem. Raises RuntimeError if a call fails."""
    (m, k), n = left.shape, right.shape[0]
    alignments = tuple(_alignment(tensor) for tensor in (right, left, total, total))
    with _LOCK:  # the descriptor of the operation has the addresses of the factors
        plan = _plan_of(_Problem(m, n, k, left.dtype, right.dtype, alignments, total.device.index))
        if plan is None:
            return False
        for attribute, factor in ((_DESC_A_SCALE_POINTER, right_factor), (_DESC_B_SCALE_POINTER, left_factor)):
            _set(plan.operation, "MatmulDescSetAttribute", attribute, ctypes.c_void_p(factor.data_ptr()))
        one = ctypes.c_float(1.0)
        stream = _stream(total)
        _call(
            "Matmul",
            _handle(total),
            plan.operation,
            ctypes.byref(one),
            right.data_ptr(),
            plan.right,
            left.data_ptr(),
            plan.left,
            ctypes.byref(one),
            total.data_ptr(),
            plan.total,
            total.data_ptr(),
            plan.total,
            ctypes.byref(plan.heuristic.algorithm),
            _workspace(total.device, stream).data_ptr(),
            _WORKSPACE,
            stream,
        )
    return True


_LOCK = threading.Lock()


@functools.cache
def _library() -> Any:
    """Returns the library with the types of its functions; None if there is none."""
    version = torch.version.cuda
    if version is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{version.partition('.')[0]}")
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, f"cublasLt{name}")
            function.argtypes, function.restype = arguments, ctypes.c_int
    except (OSError, AttributeError):
        return None
    return library


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), f"cublasLt{name}")(*arguments)
    if status:
        raise RuntimeError(f"cublasLt{name} returned status {status}")


def _set(target: ctypes.c_void_p, function: str, attribute: int, value: Any) -> None:
    _call(function, target, attribute, ctypes.byref(value), ctypes.sizeof(value))


def _create(function: str, *arguments: object) -> ctypes.c_void_p:
    created = ctypes.c_void_p()
    _call(function, ctypes.byref(created), *arguments)
    return created


@functools.cache
def _plan_of(problem: _Problem) -> _Plan | None:
    """Returns the plan of a problem, which is never freed; None if cuBLASLt has no algorithm for it."""
    m, n, k = problem.m, problem.n, problem.k
    operation = _create("MatmulDescCreate", _COMPUTE_32F, _FLOAT32)
    _set(operation, "MatmulDescSetAttribute", _DESC_TRANSA, ctypes.c_int(_TRANSPOSED))
    right = _create("MatrixLayoutCreate", _FP8[problem.right], k, n, k)
    left = _create("MatrixLayoutCreate", _FP8[problem.left], k, m, k)
    total = _create("MatrixLayoutCreate", _FLOAT32, n, m, n)
    preference = _create("MatmulPreferenceCreate")
    _set(preference, "MatmulPreferenceSetAttribute", _PREFERENCE_WORKSPACE, ctypes.c_uint64(_WORKSPACE))
    for attribute, alignment in zip(_PREFERENCE_ALIGNMENTS, problem.alignments, strict=True):
        _set(preference, "MatmulPreferenceSetAttribute", attribute, ctypes.c_uint32(alignment))
    heuristic, found = _Heuristic(), ctypes.c_int()
    status = _library().cublasLtMatmulAlgoGetHeuristic(
        torch.cuda.current_blas_handle() if problem.device is not None else None,
        *(operation, right, left, total, total, preference),
        1,
        ctypes.byref(heuristic),
        ctypes.byref(found),
    )
    _call("MatmulPreferenceDestroy", preference)
    if status or not found.value or heuristic.state:
        return None
    return _Plan(operation, right, left, total, heuristic)


def _handle(tensor: Tensor) -> int | None:
    """Returns cuBLAS's handle, which cuBLASLt takes as its own."""
    return torch.cuda.current_blas_handle() if tensor.is_cuda else None


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


@functools.cache
def _workspace(device: torch.device, stream: int) -> Tensor:
    """Returns the memory for intermediate results of the products of one stream."""
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


def _alignment(tensor: Tensor) -> int:
    """Returns the largest power of two that divides the tensor's address, at most 256."""
    address = tensor.data_ptr()
    return min(address & -address or _LARGEST_ALIGNMENT, _LARGEST_ALIGNMENT)
