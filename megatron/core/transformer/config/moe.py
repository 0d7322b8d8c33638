"""Mixture of experts."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config_fields import flag, not_a_flag, not_yet
from megatron.core.flag_grammars import layer_pattern

_MOE = "num_moe_experts"
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")


@dataclass(kw_only=True)
class MoEConfig:
    """Router, experts and dispatch. Without num_moe_experts none of it is looked at."""

    num_moe_experts: int | None = not_yet(None, on="--num-experts")
    """Experts of a mixture-of-experts layer."""

    moe_layer_freq: int | list[int] = flag(1, parse=layer_pattern, only_with=_MOE)
    """Layers with experts: every N-th, or a list expression with a 1 for each, as ([0]*3+[1]*58)."""

    moe_ffn_hidden_size: int | None = flag(None, only_with=_MOE)
    """Inner width of one expert; as --ffn-hidden-size when not given."""

    moe_latent_size: int | None = flag(None, only_with=_MOE)
    """Width that tokens are projected to before dispatch."""

    moe_shared_expert_intermediate_size: int | None = flag(None, only_with=_MOE)
    """Inner width of the experts that every token passes, all together."""

    moe_shared_expert_gate: bool = flag(False, only_with=_MOE)
    """Multiply the shared experts' output by a learnt gate."""

    moe_shared_expert_overlap: bool = flag(False, only_with=_MOE)
    """Compute shared experts while tokens are dispatched."""

    # Router ----------------------------------------------------------------------------------------------------------

    moe_router_topk: int = flag(2, only_with=_MOE)
    """Experts that a token is sent to."""

    moe_router_load_balancing_type: str | list[str] = flag(
        "aux_loss", nargs="+", words={word: word for word in _BALANCING}, only_with=_MOE
    )
    """What keeps experts evenly loaded: an auxiliary loss over the micro-batch, the sequence or the global batch,
    Sinkhorn assignment, or nothing."""

    moe_aux_loss_coeff: float | list[float] = flag(0.0, nargs="+", only_with=_MOE)
    """Weight of the auxiliary loss; one for each type."""

    moe_z_loss_coeff: float | None = flag(None, only_with=_MOE)
    """Weight of the loss that keeps router logits small."""

    moe_router_score_function: Literal["softmax", "sigmoid"] = flag("softmax", only_with=_MOE)
    """What turns logits into scores."""

    moe_router_pre_softmax: bool = flag(False, only_with=_MOE)
    """Softmax over all experts before the best are picked, instead of over the picked."""

    moe_router_topk_scaling_factor: float | None = flag(None, only_with=_MOE)
    """Factor of the picked scores."""

    moe_router_dtype: Literal["fp32", "fp64"] | None = flag(None, only_with=_MOE)
    """Type that the router computes in; the model's when not given."""

    moe_router_num_groups: int | None = flag(None, only_with=_MOE)
    """Groups of experts of which a token chooses some first."""

    moe_router_group_topk: int | None = flag(None, only_with=_MOE)
    """Groups that a token chooses."""

    moe_router_topk_limited_devices: int | None = not_a_flag(None)
    """Expert parallel ranks that a token may be sent to."""

    moe_router_enable_expert_bias: bool = flag(False, only_with=_MOE)
    """A bias for each expert, moved after each step, evens the load without a loss."""

    moe_router_bias_update_rate: float = flag(0.001, only_with=_MOE)
    """Size of that bias's step."""

    moe_router_force_load_balancing: bool = flag(False, only_with=_MOE)
    """Route at random, for measurements."""

    moe_router_padding_for_quantization: bool | None = flag(False, only_with=_MOE)
    """Pad each expert's tokens to what fp8 and fp4 products need."""

    moe_router_padding_for_fp8: bool | None = flag(False, only_with=_MOE)
    """Former spelling of --moe-router-padding-for-quantization."""

    moe_router_fusion: bool = flag(False, only_with=_MOE)
    """Router in one kernel."""

    moe_enable_routing_replay: bool = flag(False, only_with=_MOE)
    """Record routing decisions and use them again."""

    moe_input_jitter_eps: float | None = flag(None, only_with=_MOE)
    """Multiply the router's input by noise of this size."""

    # Capacity --------------------------------------------------------------------------------------------------------

    moe_expert_capacity_factor: float | None = flag(None, only_with=_MOE)
    """Tokens an expert takes, in parts of an even share; the rest are dropped. All when not given."""

    moe_pad_expert_input_to_capacity: bool = flag(False, only_with=_MOE)
    """Pad each expert's tokens to its capacity."""

    moe_token_drop_policy: Literal["probs", "position"] = flag("probs", only_with=_MOE)
    """Which tokens are dropped: the least wanted, or the last."""

    moe_token_dropping: bool = not_a_flag(False)
    """Unused since older releases."""

    # Dispatch and compute --------------------------------------------------------------------------------------------

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = flag("allgather", only_with=_MOE)
    """How tokens travel to experts."""

    moe_enable_deepep: bool = flag(False, only_with=_MOE)
    """Former spelling of --moe-flex-dispatcher-backend deepep."""

    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] = flag("deepep", only_with=_MOE)
    """Kernels of the flex dispatcher."""

    moe_deepep_num_sms: int = flag(20, only_with=_MOE)
    """Multiprocessors that DeepEP takes."""

    moe_hybridep_num_sms: int = flag(16, only_with=_MOE)
    """Multiprocessors that HybridEP takes."""

    moe_grouped_gemm: bool = flag(False, only_with=_MOE)
    """All experts of a rank in one grouped product."""

    moe_use_legacy_grouped_gemm: bool = flag(False, only_with=_MOE)
    """The older layout of grouped expert weights."""

    moe_permute_fusion: bool = flag(False, only_with=_MOE)
    """Reorder tokens in one kernel."""

    moe_apply_probs_on_input: bool = flag(False, only_with=_MOE)
    """Multiply an expert's input, not its output, by the router's weight."""

    moe_layer_recompute: bool = flag(False, only_with=_MOE)
    """Recompute whole expert layers in backward."""

    moe_per_layer_logging: bool = flag(False, only_with=_MOE)
    """Log auxiliary losses layer by layer."""
