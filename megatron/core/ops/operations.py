"""The records of the operations in this folder, and of those that carry a state along the row."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from megatron.core.ops.causal_conv import causal_conv
from megatron.core.ops.cross_entropy import cross_entropy
from megatron.core.ops.delta_rule.attention import delta_rule_attention
from megatron.core.ops.embedding import embedding
from megatron.core.ops.gated_norm import gated_rms_norm
from megatron.core.ops.head_loss import head_loss
from megatron.core.ops.linear import linear, sum_rows
from megatron.core.ops.norm import layer_norm, layer_norm_with_residual, rms_norm, rms_norm_with_residual
from megatron.core.ops.records import Ops, on_gpus, operation
from megatron.core.ops.ssd.scan import mamba_scan


@dataclass(frozen=True)
class MatrixOps(Ops):
    """Operations with a weight matrix."""

    linear: Callable[..., Tensor] = operation(linear, "biases")
    embedding: Callable[..., Tensor] = operation(embedding, "embeddings")
    sum_rows: Callable[[Tensor], Tensor] = sum_rows

    @classmethod
    def by_triton(cls) -> Self:
        """Returns the record with our kernels for GPUs."""
        from megatron.core.ops import sum_rows_triton
        from megatron.core.ops.embedding_triton import accumulate_rows_triton

        return on_gpus(
            cls(),
            sum_rows_triton,
            linear=functools.partial(linear, sum_rows=sum_rows_triton.sum_rows_triton),
            embedding=functools.partial(embedding, accumulate_rows=accumulate_rows_triton),
        )


@dataclass(frozen=True)
class NormOps(Ops):
    """The norms of layers."""

    layer_norm: Callable[..., Tensor] = operation(layer_norm, "norms")
    rms_norm: Callable[..., Tensor] = operation(rms_norm, "norms")
    layer_norm_with_residual: Callable[..., tuple[Tensor, Tensor]] = operation(layer_norm_with_residual, "norms")
    rms_norm_with_residual: Callable[..., tuple[Tensor, Tensor]] = operation(rms_norm_with_residual, "norms")

    @classmethod
    def by_triton(cls) -> Self:
        """Returns the record with our kernels for GPUs."""
        from megatron.core.ops import norm_triton

        return on_gpus(cls(), norm_triton).with_noting("layer_norm_with_residual", "rms_norm_with_residual")


@dataclass(frozen=True)
class _WithResidual:
    norm: Callable[..., Tensor]

    def __call__(self, inputs: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
        return self.norm(inputs, *parameters), inputs


def every_norm(layer_norm: Callable[..., Tensor], rms_norm: Callable[..., Tensor]) -> dict[str, object]:
    """Returns the operations of the record, by name, of a package whose norms return no residual."""
    return {
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "layer_norm_with_residual": _WithResidual(layer_norm),
        "rms_norm_with_residual": _WithResidual(rms_norm),
    }


@dataclass(frozen=True)
class RecurrenceOps(Ops):
    """The operations of layers that carry a state along the row."""

    causal_conv: Callable[..., Tensor] = operation(causal_conv, "convolutions")
    gated_rms_norm: Callable[..., Tensor] = operation(gated_rms_norm, "norms")
    delta_rule_attention: Callable[..., Tensor] = operation(delta_rule_attention, "gated delta nets")
    mamba_scan: Callable[..., Tensor] = operation(mamba_scan, "state spaces")

    @classmethod
    def by_triton(cls) -> Self:
        """Returns the record with our kernels for GPUs."""
        from megatron.core.ops import causal_conv_triton, gated_norm_triton
        from megatron.core.ops.delta_rule import attention_triton
        from megatron.core.ops.ssd import scan_triton

        return on_gpus(cls(), causal_conv_triton, gated_norm_triton, attention_triton, scan_triton)


@dataclass(frozen=True)
class LossOps(Ops):
    """Cross entropy, of logits and of hidden states."""

    cross_entropy: Callable[..., Tensor] = operation(cross_entropy, "losses")
    head_loss: Callable[..., Tensor] = operation(head_loss, "losses")

    @classmethod
    def by_triton(cls) -> Self:
        """Returns the record with our kernels for GPUs."""
        from megatron.core.ops import cross_entropy_triton as ours

        return on_gpus(cls(), ours, head_loss=functools.partial(head_loss, loss=ours.cross_entropy_triton))
