"""Which implementation of each operation a layer uses.

A backend is a frozen record of functions. A layer asks `choose_backend` once, when it is built; its forward calls what
the record holds and never asks again. Where an operation has a kernel for one kind of device only, the record holds
`by_device(...)`, so that a model may be built on one device and moved to another.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.ops.attention import AttentionVariant
from megatron.core.ops.attention_kernels import CANDIDATES, AttentionKernel, Situation
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
    attention: Mapping[AttnBackend, tuple[AttentionKernel, ...]] = field(default_factory=lambda: CANDIDATES)
    """For what a config asks, in order of preference; a layer takes the first that does not refuse."""

    def describe(self) -> str:
        """One line: the backend, and the operations that are not plain torch."""
        operations = [entry for entry in dataclasses.fields(self) if entry.name not in ("name", "attention")]
        own = [
            f"{entry.name} by {getattr(self, entry.name).__name__}"
            for entry in operations
            if getattr(self, entry.name) is not entry.default
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
        from megatron.core.ops import cross_entropy_triton, dropout_triton
    except ImportError:
        return None
    loss = by_device(cpu=cross_entropy, cuda=cross_entropy_triton.cross_entropy_triton)
    head = functools.partial(head_loss, loss=loss)
    head.__name__ = loss.__name__  # type: ignore[attr-defined]
    return dataclasses.replace(
        LOCAL,
        name="triton",
        cross_entropy=loss,
        head_loss=head,
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
    """Choose the kernels of an attention layer by the config's `params_dtype` and `attention_backend`.

    Raises UserError where flash or fused is asked for and cannot do what training on unpacked documents needs.
    """
    kernels = {}
    for device_type, training, packed in itertools.product(("cpu", "cuda"), (True, False), (False, True)):
        situation = Situation(device_type, config.params_dtype, training, packed)
        kernels[situation] = _first_willing(backend, variant, situation, config.attention_backend)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    _check_asked(backend, variant, Situation(device_type, config.params_dtype, True, False), config.attention_backend)
    return AttentionPlan(kernels)


def _first_willing(
    backend: Backend, variant: AttentionVariant, situation: Situation, asked: AttnBackend
) -> AttentionKernel:
    return next(kernel for kernel in backend.attention[asked] if kernel.refusal(variant, situation) is None)


def _check_asked(backend: Backend, variant: AttentionVariant, situation: Situation, asked: AttnBackend) -> None:
    wanted = backend.attention[asked][:-1]
    reasons = [f"{kernel.name}: {kernel.refusal(variant, situation)}" for kernel in wanted]
    if not wanted or asked is AttnBackend.auto or _first_willing(backend, variant, situation, asked) in wanted:
        return
    way = f"attention_dropout {variant.dropout} to 0, or attention_backend" if variant.dropout else "attention_backend"
    raise UserError(
        f"attention_backend {asked.name} cannot compute this attention; set {way} to auto or unfused "
        f"({'; '.join(reasons)})"
    )
