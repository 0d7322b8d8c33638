"""Operations of a layer through torch.compile (`--torch-compile`): norms, rotary positions, activations with their
bias, sums of bias and residual.

Each operation is one compiled graph with its backward. All layers share the graph. It is compiled again for other kinds
of inputs: another number of dimensions, no gradients, changing sizes. These operations have no side effects, so the
code around them stays the same: layers, linear layers, communication, main gradients, recomputation and hooks.
"""

import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.moe.weighted_activation import weighted_activation
from megatron.core.ops.norm import layer_norm, rms_norm
from megatron.core.ops.operations import every_norm
from megatron.core.ops.rope import Rotation
from megatron.core.utils.torch_private import raise_recompile_limit

_MOST_VARIANTS = 32
"""Most variants of one operation. Further ones run eagerly, and torch says so."""


@functools.cache
def compiled_operations(compiler: str) -> dict[str, dict[str, Any]]:
    """Returns the compiled operations of each record of a `Backend`, by their names, but for `bias_dropout_add`.
    `compiler` is a backend of torch.compile; kernels are made when an operation is first called."""
    raise_recompile_limit(_MOST_VARIANTS)
    made = functools.partial(torch.compile, backend=compiler)
    return {
        "norms": every_norm(made(layer_norm), made(rms_norm)),
        "attention": {"apply_rope": made(rotate)},
        "experts": {"weighted_activation": made(weighted_activation)},
    }


@dataclass(frozen=True)
class CompiledBiasAdd:
    """`bias_dropout_add` whose sum of input, bias and residual is compiled. `others` computes other cases: with dropout
    our own kernels draw the masks, and a sum of two is one kernel anyhow."""

    others: Callable[..., Tensor]
    compiler: str

    def __call__(
        self, inputs: Tensor, bias: Tensor | None, residual: Tensor | None, probability: float, rng_position: Any
    ) -> Tensor:
        """Returns residual + dropout(inputs + bias), all [t, h] (bias [h])."""
        drops = rng_position is not None and probability > 0.0
        if drops or bias is None or residual is None:
            return self.others(inputs, bias, residual, probability, rng_position)
        return _compiled_sum(self.compiler)(inputs, bias, residual)


@functools.cache
def _compiled_sum(compiler: str) -> Callable[..., Tensor]:
    return torch.compile(_sum, backend=compiler)


def _sum(inputs: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual + (inputs + bias)


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Computes `apply_rope` without writing into parts of a tensor, so that it can be traced as one graph."""
    ones = (1,) * (heads.dim() - 3)
    dtype = torch.promote_types(heads.dtype, torch.float32)
    cos, sin = (angles.to(dtype).unflatten(2, ones) for angles in (rotation.cos, rotation.sin))
    start, half = rotation.first, cos.shape[-1]
    end = start + 2 * half
    rotated = heads[..., start:end].to(dtype)  # the two parts of its gradient are added before they are rounded
    if rotation.interleaved:
        x, y = rotated[..., ::2], rotated[..., 1::2]
        rotated = torch.stack((x * cos - y * sin, y * cos + x * sin), -1).flatten(-2)
    else:
        x, y = rotated[..., :half], rotated[..., half:]
        rotated = torch.cat((x * cos - y * sin, y * cos + x * sin), -1)
    return torch.cat((heads[..., :start], rotated.to(heads.dtype), heads[..., end:]), -1).contiguous()


def missing_compiler(has_gpu: bool) -> str | None:
    """Returns why torch's default compiler, inductor, cannot work on this machine: Triton (for a GPU) or a C++ compiler
    (for a CPU) is missing. None if nothing is missing."""
    if has_gpu:
        return None if find_spec("triton") else "Triton, which compiles for GPUs, is not installed; install triton"
    name = os.environ.get("CXX", "g++")  # as inductor looks for it
    if shutil.which(name):
        return None
    return f"there is no C++ compiler {name}, which a CPU needs; install g++, or name another one in the variable CXX"
