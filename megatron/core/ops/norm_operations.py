"""LayerNorm and RMSNorm, as a record."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from megatron.core.ops.norm import layer_norm, layer_norm_with_residual, rms_norm, rms_norm_with_residual
from megatron.core.ops.records import Ops, on_gpus, operation


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
        from megatron.core.ops import norm_triton as ours

        record = on_gpus(
            cls(),
            layer_norm=ours.layer_norm_triton,
            rms_norm=ours.rms_norm_triton,
            layer_norm_with_residual=ours.layer_norm_with_residual_triton,
            rms_norm_with_residual=ours.rms_norm_with_residual_triton,
        )
        return record.with_noting("layer_norm_with_residual", "rms_norm_with_residual")


@dataclass(frozen=True)
class _WithResidual:
    norm: Callable[..., Tensor]

    def __call__(self, inputs: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
        return self.norm(inputs, *parameters), inputs


def every_norm(layer_norm: Callable[..., Tensor], rms_norm: Callable[..., Tensor]) -> dict[str, Any]:
    """Returns the operations of the record, by name, of a package whose norms return no residual."""
    return {
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "layer_norm_with_residual": _WithResidual(layer_norm),
        "rms_norm_with_residual": _WithResidual(rms_norm),
    }
