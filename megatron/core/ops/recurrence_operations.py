"""The operations of Mamba-2 layers and gated delta nets, as a record."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from megatron.core.ops.causal_conv import causal_conv
from megatron.core.ops.delta_rule.attention import delta_rule_attention
from megatron.core.ops.gated_norm import gated_rms_norm
from megatron.core.ops.records import Ops, on_gpus, operation
from megatron.core.ops.split_columns import split_columns
from megatron.core.ops.ssd.scan import mamba_scan


@dataclass(frozen=True)
class RecurrenceOps(Ops):
    """The operations of layers that carry a state along the row."""

    causal_conv: Callable[..., Tensor] = operation(causal_conv, "convolutions")
    gated_rms_norm: Callable[..., Tensor] = operation(gated_rms_norm, "norms")
    delta_rule_attention: Callable[..., Tensor] = operation(delta_rule_attention, "gated delta nets")
    mamba_scan: Callable[..., Tensor] = operation(mamba_scan, "state spaces")
    split_columns: Callable[..., tuple[Tensor, ...]] = split_columns

    @classmethod
    def by_triton(cls) -> Self:
        """Returns the record with our kernels for GPUs."""
        from megatron.core.ops.causal_conv_triton import causal_conv_triton
        from megatron.core.ops.delta_rule.attention_triton import delta_rule_attention_triton
        from megatron.core.ops.gated_norm_triton import gated_rms_norm_triton
        from megatron.core.ops.split_columns_triton import split_columns_triton
        from megatron.core.ops.ssd.scan_triton import mamba_scan_triton

        return on_gpus(
            cls(),
            causal_conv=causal_conv_triton,
            gated_rms_norm=gated_rms_norm_triton,
            delta_rule_attention=delta_rule_attention_triton,
            mamba_scan=mamba_scan_triton,
            split_columns=split_columns_triton,
        )
