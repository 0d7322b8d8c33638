"""Token mixers other than softmax attention: sparse and linear attention, state space layers."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_yet
from megatron.core.flag_grammars import layer_pattern

_VARIANT = "experimental_attention_variant"


@dataclass(kw_only=True)
class TokenMixerConfig:
    """Layers that mix tokens by other means than softmax attention, and their sizes."""

    experimental_attention_variant: Literal["gated_delta_net", "dsa"] | None = not_yet(None)
    """Replace attention by gated delta rule layers or by sparse attention with an indexer."""

    dsa_indexer_n_heads: int | None = flag(None, only_with=_VARIANT)
    """Number of heads of the indexer of sparse attention."""

    dsa_indexer_head_dim: int | None = flag(None, only_with=_VARIANT)
    """Width of one head of the indexer."""

    dsa_indexer_topk: int | None = flag(None, only_with=_VARIANT)
    """Number of keys that the indexer selects for a query."""

    dsa_indexer_loss_coeff: float | None = flag(None, only_with=_VARIANT)
    """Coefficient of the indexer's loss."""

    dsa_indexer_use_sparse_loss: bool = flag(False, only_with=_VARIANT)
    """Compute the indexer's loss over the selected keys only."""

    linear_attention_freq: int | list[int] | None = flag(None, parse=layer_pattern, only_with=_VARIANT)
    """Layers with linear attention: all but every N-th, or a list expression with a 1 for each."""

    linear_conv_kernel_dim: int | None = flag(4, only_with=_VARIANT)
    """Length of the convolution of a gated delta rule layer."""

    linear_key_head_dim: int | None = flag(128, only_with=_VARIANT)
    """Width of a query or key head of a gated delta rule layer."""

    linear_value_head_dim: int | None = flag(128, only_with=_VARIANT)
    """Width of a value head of a gated delta rule layer."""

    linear_num_key_heads: int | None = flag(16, only_with=_VARIANT)
    """Number of query and key heads of a gated delta rule layer."""

    linear_num_value_heads: int | None = flag(32, only_with=_VARIANT)
    """Number of value heads of a gated delta rule layer."""

    is_hybrid_model: bool = not_yet(False)
    """The model mixes attention, MLP and state space layers."""

    mamba_state_dim: int = flag(128, only_with="is_hybrid_model")
    """State size of a Mamba layer."""

    mamba_head_dim: int = flag(64, only_with="is_hybrid_model")
    """Width of one head of a Mamba layer."""

    mamba_num_groups: int = flag(8, only_with="is_hybrid_model")
    """Number of groups of a Mamba layer."""

    mamba_num_heads: int | None = flag(None, only_with="is_hybrid_model")
    """Number of heads of a Mamba layer. Default: derived from the hidden size."""

    use_mamba_mem_eff_path: bool = flag(True, off="--disable-mamba-mem-eff-path", only_with="is_hybrid_model")
    """Compute Mamba layers in one fused kernel."""
