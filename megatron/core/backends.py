"""Which implementation of each operation a layer uses.

A backend is a frozen record of functions. A layer asks `choose_backend` once, when it is built; its forward calls what
the record holds and never asks again. Where an operation has a kernel for one kind of device only, the record holds
`by_device(...)`, so that a model may be built on one device and moved to another.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.ops import attention_kernels
from megatron.core.ops.attention import AttentionVariant
from megatron.core.ops.attention_kernels import AttentionKernel, Situation
from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.ops.dropout import bias_dropout_add, keep_rows
from megatron.core.ops.dropout_cpu import keep_rows_compiled
from megatron.core.ops.embedding import embedding
from megatron.core.ops.head_loss import head_loss
from megatron.core.ops.linear import linear
from megatron.core.ops.norm import layer_norm, rms_norm
from megatron.core.ops.rope import apply_rope
from megatron.core.transformer.enums import AttnBackend


@dataclass(frozen=True)
class Backend:
    """Implementations, each with the signature and meaning of the function of that name in `megatron.core.ops`."""

    name: str
    linear: Callable[..., Tensor] = linear
    embedding: Callable[..., Tensor] = embedding
    layer_norm: Callable[..., Tensor] = layer_norm
    rms_norm: Callable[..., Tensor] = rms_norm
    apply_rope: Callable[..., Tensor] = apply_rope
    keep_rows: Callable[..., Tensor] = keep_rows
    bias_dropout_add: Callable[..., Tensor] = bias_dropout_add
    cross_entropy: Callable[..., Tensor] = cross_entropy
    head_loss: Callable[..., Tensor] = head_loss
    attention: tuple[AttentionKernel, ...] = attention_kernels.KERNELS
    """In order of preference; a layer takes the first that does not refuse."""

    def describe(self) -> str:
        """One line: the backend, and the operations that are not plain torch."""
        own = [
            f"{field.name} by {getattr(self, field.name).__name__}"
            for field in dataclasses.fields(self)
            if field.name not in ("name", "attention") and getattr(self, field.name) is not field.default
        ]
        return f"backend {self.name}: plain torch" + (" but for " + ", ".join(own) if own else "")


def by_device(cpu: Callable[..., Any], cuda: Callable[..., Any]) -> Callable[..., Any]:
    """`cuda` for tensors on a GPU, `cpu` for all others; the first tensor among the arguments tells."""

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        first = next(argument for argument in args if isinstance(argument, Tensor))
        return (cuda if first.is_cuda else cpu)(*args, **kwargs)

    dispatch.__name__ = f"{cuda.__name__} on CUDA and {cpu.__name__} elsewhere"
    return dispatch


LOCAL = Backend("local", keep_rows=by_device(cpu=keep_rows_compiled, cuda=keep_rows))
"""Plain torch on any device, and numba for random masks on a CPU."""


@functools.cache
def triton_backend() -> Backend | None:
    """Kernels of our own where they are faster than torch's; None where Triton cannot be imported."""
    try:
        from megatron.core.ops import dropout_triton
    except ImportError:
        return None
    return dataclasses.replace(
        LOCAL,
        name="triton",
        keep_rows=by_device(cpu=keep_rows_compiled, cuda=dropout_triton.keep_rows_triton),
        bias_dropout_add=by_device(cpu=bias_dropout_add, cuda=dropout_triton.bias_dropout_add_triton),
    )


def choose_backend(config: ModelParallelConfig, layer_number: int | None = None) -> Backend:
    """The backend of a layer (counted from 1 over the whole model; None: embedding, head, a lone module): LOCAL where
    `transformer_impl` asks for it and where there is no GPU or no Triton."""
    if getattr(config, "transformer_impl", "auto") == "local" or not torch.cuda.is_available():
        return LOCAL
    return triton_backend() or LOCAL


# ---------------------------------------------------------------------------------------------------------------------
# Attention


@dataclass(frozen=True)
class AttentionPlan:
    """The kernel of an attention layer for every situation it may be called in."""

    kernels: dict[Situation, AttentionKernel]

    def describe(self, device_type: str) -> str:
        """One line: what trains, what evaluates, and what packed documents use, on one kind of device."""
        words = []
        for situation, kernel in self.kernels.items():
            if situation.device_type == device_type:
                kind = "training" if situation.training else "evaluation"
                words.append(f"{kind}{' on packed documents' if situation.packed else ''} by {kernel.name}")
        return f"attention on {device_type}: " + ", ".join(words)


def plan_attention(backend: Backend, variant: AttentionVariant, config: Any) -> AttentionPlan:
    """Choose the kernels of an attention layer. Raises UserError where `attention_backend` asks for the impossible."""
    kernels = {}
    for device_type in ("cpu", "cuda"):
        for training in (True, False):
            for packed in (False, True):
                situation = Situation(device_type, config.params_dtype, training, packed)
                kernels[situation] = _choose_kernel(backend, variant, situation, config.attention_backend)
    return AttentionPlan(kernels)


def _choose_kernel(
    backend: Backend, variant: AttentionVariant, situation: Situation, asked: AttnBackend
) -> AttentionKernel:
    unfused = backend.attention[-1]
    if asked in (AttnBackend.unfused, AttnBackend.local):
        return unfused
    reasons = []
    for kernel in backend.attention:
        reason = kernel.refusal(variant, situation)
        if reason is None:
            break
        reasons.append(f"{kernel.name}: {reason}")
    if asked is not AttnBackend.auto and kernel is unfused and situation.training and not situation.packed:
        if variant.dropout:
            way = f"attention_dropout {variant.dropout} to 0, or attention_backend to auto or unfused"
        else:
            way = "attention_backend to auto or unfused"
        raise UserError(
            f"attention_backend {asked.name} cannot compute this attention; set {way} ({'; '.join(reasons)})"
        )
    return kernel
