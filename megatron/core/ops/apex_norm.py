"""LayerNorm and RMSNorm by apex's fused kernels, with the signatures of `ops.norm`."""

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops import norm
from megatron.core.utils.warn import warn_on_first_rank

_NAMES = (
    "fused_layer_norm_affine",
    "fused_rms_norm_affine",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
)
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class ApexNorms:
    """The norms of a backend on a GPU. Plain torch computes what apex does not: norms without weight or bias, and
    float64."""

    def __init__(self, functions: Any) -> None:
        """`functions` is apex's module. Raises AttributeError if its release lacks a norm."""
        self._functions = {name: getattr(functions, name) for name in _NAMES}

    def layer_norm(
        self, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, zero_centered: bool = False
    ) -> Tensor:
        """Returns `ops.norm.layer_norm` of the arguments."""
        if weight is None or bias is None or not _takes(inputs, weight):
            return norm.layer_norm(inputs, weight, bias, epsilon, zero_centered)
        return self._computed("fused_layer_norm_affine", inputs, weight, zero_centered, epsilon, bias)

    def rms_norm(self, inputs: Tensor, weight: Tensor | None, epsilon: float, zero_centered: bool = False) -> Tensor:
        """Returns `ops.norm.rms_norm` of the arguments."""
        if weight is None or not _takes(inputs, weight):
            return norm.rms_norm(inputs, weight, epsilon, zero_centered)
        return self._computed("fused_rms_norm_affine", inputs, weight, zero_centered, epsilon)

    def _computed(
        self, name: str, inputs: Tensor, weight: Tensor, zero_centered: bool, epsilon: float, *bias: Tensor
    ) -> Tensor:
        dtype = weight.dtype
        if zero_centered:  # 1 + weight in float32: bfloat16 has too few bits near 1
            weight, bias = weight.float() + 1.0, tuple(part.float() for part in bias)
        mixed = "mixed_dtype_" if inputs.dtype is not weight.dtype else ""
        result: Tensor = self._functions[mixed + name](inputs, weight, *bias, tuple(weight.shape), epsilon)
        return result if result.dtype is dtype else result.to(dtype)


def _takes(inputs: Tensor, weight: Tensor) -> bool:
    return inputs.dtype in _TYPES and weight.dtype in _TYPES and inputs.numel() > 0


def find_apex_norms() -> ApexNorms | None:
    """Returns apex's norms; None without a GPU or apex. If they cannot be imported, a warning says why."""
    if not torch.cuda.is_available() or importlib.util.find_spec("apex") is None:
        return None
    return _import_norms()


@functools.cache
def _import_norms() -> ApexNorms | None:
    try:
        importlib.import_module("fused_layer_norm_cuda")  # apex without its compiled parts fails in the first call only
        return ApexNorms(importlib.import_module("apex.normalization.fused_layer_norm"))
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warn_on_first_rank(f"apex is installed and its norms are not used: {reason}; plain torch computes them")
        return None
