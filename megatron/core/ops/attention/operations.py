"""The operations of attention, as a record."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from megatron.core.ops.attention.blocks import merge_block
from megatron.core.ops.attention.indexer import index_scores
from megatron.core.ops.attention.kernels import (
    BLOCK_CANDIDATES,
    CANDIDATES,
    AttentionKernel,
    BlockKernel,
    OwnFlash,
    before_unfused,
    own_flash_kernels,
    with_masked,
    with_own_flash,
)
from megatron.core.ops.attention.max_logits import max_attention_logits
from megatron.core.ops.attention.output_gate import gate_output
from megatron.core.ops.normed_rope import normed_rope
from megatron.core.ops.records import Ops, on_gpus, operation
from megatron.core.ops.rope import apply_rope
from megatron.core.transformer.enums import AttnBackend


@dataclass(frozen=True)
class AttentionOps(Ops):
    """What attention layers compute between their products."""

    apply_rope: Callable[..., Tensor] = operation(apply_rope, "rotary positions")
    normed_rope: Callable[..., Tensor] | None = None
    """`rms_norm` of heads and `apply_rope` as one operation; None: they are two."""
    gate_output: Callable[[Tensor, Tensor], Tensor] = operation(gate_output, "attention")
    merge_block: Callable[..., None] = operation(merge_block, "attention")
    max_attention_logits: Callable[..., Tensor] = operation(max_attention_logits, "attention")
    index_scores: Callable[..., Tensor] = operation(index_scores, "attention")
    """Its kernel computes no gradients."""
    kernels: Mapping[AttnBackend, tuple[AttentionKernel, ...]] = field(default_factory=lambda: CANDIDATES)
    """Attention kernels for each value of `attention_backend`, in order of preference. A layer uses the first kernel
    that supports it."""
    block_kernels: Mapping[AttnBackend, tuple[BlockKernel, ...]] = field(default_factory=lambda: BLOCK_CANDIDATES)
    """Attention kernels for rows that are split over ranks, in order of preference."""

    @classmethod
    def by_triton(cls) -> Self:
        """Returns the record with our kernels for GPUs."""
        from megatron.core.ops import normed_rope_triton, rope_triton
        from megatron.core.ops.attention import (
            flash_triton,
            indexer_triton,
            masked_triton,
            max_logits_triton,
            merge_triton,
            output_gate_triton,
        )

        own_flash = OwnFlash(flash_triton.has_specialized_warps)
        whole_rows, blocks = own_flash_kernels(
            own_flash,
            flash_triton.flash_attention_triton,
            flash_triton.flash_block_attention_triton,
            flash_triton.flash_block_attention_backward_triton,
        )
        plain = cls(
            normed_rope=normed_rope,
            kernels=with_masked(
                with_own_flash(CANDIDATES, whole_rows, own_flash), masked_triton.masked_attention_triton
            ),
            block_kernels=before_unfused(BLOCK_CANDIDATES, blocks),
        )
        own = max_logits_triton, merge_triton, indexer_triton, output_gate_triton
        return on_gpus(plain, normed_rope_triton, rope_triton, *own)
