"""Megatron-LM's function for users' own layers that rotates heads."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.ops.rope import apply_rope, rotation_of_angles

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config: "TransformerConfig",
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> Tensor:
    """Returns heads [s, b, heads, d] with their first r channels rotated by the angles [s, 1, 1, r] of
    `RotaryEmbedding`, which contain each angle twice. `mscale` multiplies cosines and sines. Raises UserError for
    packed documents (`cu_seqlens`): the caller must pass the angles of positions within the documents."""
    if cu_seqlens is not None:
        raise UserError(
            "apply_rotary_pos_emb(cu_seqlens=...): not yet; give angles of each token's position in its document"
        )
    if t.shape[0] != freqs.shape[0]:
        raise UserError(
            f"apply_rotary_pos_emb: {t.shape[0]} tokens, but angles of {freqs.shape[0]} positions; give as many"
        )
    interleaved = bool(getattr(config, "rotary_interleaved", False))
    return apply_rope(t, rotation_of_angles(freqs, interleaved, mscale))
