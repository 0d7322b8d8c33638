"""Mixture of experts."""

from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.config_fields import flag, not_a_flag, not_yet
from megatron.core.flag_grammars import layer_pattern

_MOE = "num_moe_experts"
_SHARED = "moe_shared_expert_intermediate_size"
_NO_DEEPEP = "tokens travel by the all-to-all of torch.distributed, without kernels of DeepEP or HybridEP"
BALANCE_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_BALANCING = (*BALANCE_LOSSES, "sinkhorn", "none")


@dataclass(kw_only=True)
class MoEConfig:
    """Router, experts and dispatch. Without num_moe_experts none of it is looked at."""

    num_moe_experts: int | None = flag(None, on="--num-experts")
    """Experts of a mixture-of-experts layer."""

    moe_layer_freq: int | list[int] = flag(1, parse=layer_pattern, only_with=_MOE)
    """Layers with experts: every N-th, or a list expression with a 1 for each, as ([0]*3+[1]*58)."""

    moe_ffn_hidden_size: int | None = flag(None, only_with=_MOE)
    """Inner width of one expert; as --ffn-hidden-size when not given."""

    moe_expert_mlp_bias: bool | None = flag(
        None, on="--moe-expert-mlp-bias", off="--no-moe-expert-mlp-bias", only_with=_MOE
    )
    """Biases in the products of experts; as --disable-bias-linear says when not given."""

    moe_latent_size: int | None = flag(None, only_with=_MOE)
    """Width that tokens are projected to before they are dispatched, and that experts work at."""

    moe_shared_expert_intermediate_size: int | None = flag(None, only_with=_MOE)
    """Inner width of the experts that every token passes, all together."""

    moe_shared_expert_gate: bool = flag(False, only_with=_SHARED)
    """Multiply the shared experts' output by a learnt gate."""

    moe_shared_expert_overlap: bool = flag(False, only_with=_SHARED)
    """Compute shared experts while tokens are on their way to the other experts and back, in both passes."""

    # Router ----------------------------------------------------------------------------------------------------------

    moe_router_topk: int = flag(2, only_with=_MOE)
    """Experts that a token is sent to."""

    moe_router_load_balancing_type: str | list[str] = flag(
        "aux_loss", nargs="+", words={word: word for word in _BALANCING}, only_with=_MOE
    )
    """What keeps experts evenly loaded: auxiliary losses over the micro-batch, each sequence, or the global batch so
    far (several may be given), Sinkhorn assignment over the micro-batch, or nothing. A micro-batch's tokens are taken
    together, whatever the layout. global_aux_loss depends on it: what was seen so far are all data parallel ranks'
    micro-batches up to this one."""

    moe_aux_loss_coeff: float | list[float] = flag(0.0, nargs="+", only_with=_MOE)
    """Weight of the auxiliary loss; one for each type, or one for all."""

    moe_z_loss_coeff: float | None = flag(None, only_with=_MOE)
    """Weight of the loss that keeps router logits small."""

    moe_router_score_function: Literal["softmax", "sigmoid"] = flag("softmax", only_with=_MOE)
    """What turns logits into scores."""

    moe_router_pre_softmax: bool = flag(False, only_with=_MOE)
    """Softmax over all experts before the best are picked, instead of over the picked."""

    moe_router_topk_scaling_factor: float | None = flag(None, only_with=_MOE)
    """Factor of the picked scores."""

    moe_router_norm_topk_prob: bool | None = flag(
        None, on="--moe-router-norm-topk-prob", off="--no-moe-router-norm-topk-prob", only_with=_MOE
    )
    """Divide the picked scores by their sum; when not given, a sigmoid's are, if there are several, and a softmax's are
    not."""

    moe_router_bias: bool | None = flag(None, on="--moe-router-bias", off="--no-moe-router-bias", only_with=_MOE)
    """A bias on the router's logits; as --disable-bias-linear says when not given."""

    moe_router_dtype: Literal["fp32", "fp64"] | None = flag(None, only_with=_MOE)
    """Type that the router computes in, at least; the model's when not given."""

    moe_router_num_groups: int | None = flag(None, only_with=_MOE)
    """Groups of experts of which a token chooses some first."""

    moe_router_group_topk: int | None = flag(None, only_with=_MOE)
    """Groups that a token chooses."""

    moe_router_group_score_topk: int | None = flag(None, only_with=_MOE)
    """How many of a group's best scores make its own: --moe-router-topk / --moe-router-group-topk when not given.
    DeepSeek-V2 has 1, DeepSeek-V3 has 2."""

    moe_router_topk_limited_devices: int | None = not_a_flag(None)
    """Expert parallel ranks that a token may be sent to: refused, since experts would depend on their number."""

    moe_router_enable_expert_bias: bool = flag(False, only_with=_MOE)
    """A bias for each expert, moved after each step, evens the load without a loss."""

    moe_router_bias_update_rate: float = flag(0.001, only_with="moe_router_enable_expert_bias")
    """Size of that bias's step."""

    moe_router_force_load_balancing: bool = flag(False, only_with=_MOE)
    """Route by random logits, for measurements; gradients go to the router's own."""

    moe_router_padding_for_quantization: bool | None = flag(
        False, only_with=_MOE, no_effect="no product is quantised yet, so that none needs padding"
    )
    """Pad each expert's tokens to what fp8 and fp4 products need."""

    moe_router_padding_for_fp8: bool | None = flag(
        False, only_with=_MOE, no_effect="no product is quantised yet, so that none needs padding"
    )
    """Former spelling of --moe-router-padding-for-quantization."""

    moe_router_fusion: bool = flag(
        False, only_with=_MOE, no_effect="the router's operations are torch's; its result is the same"
    )
    """Router in one kernel."""

    moe_enable_routing_replay: bool = not_yet(False, only_with=_MOE)
    """Record routing decisions and use them again."""

    moe_input_jitter_eps: float | None = flag(None, only_with=_MOE)
    """In training, multiply the router's input by noise from 1 - eps to 1 + eps."""

    # Capacity --------------------------------------------------------------------------------------------------------

    moe_expert_capacity_factor: float | None = flag(None, only_with=_MOE)
    """Tokens an expert takes, in parts of an even share of the micro-batch's tokens, all tensor and context parallel
    ranks' together; the rest are dropped. All when not given or negative."""

    moe_pad_expert_input_to_capacity: bool = flag(
        False, only_with=_MOE, no_effect="padding changes no result; experts compute the tokens that they take"
    )
    """Pad each expert's tokens to its capacity."""

    moe_token_drop_policy: Literal["probs", "position"] = flag("probs", only_with="moe_expert_capacity_factor")
    """Which tokens are dropped: those of least weight, or the last of the micro-batch (by position, then row)."""

    moe_token_dropping: bool = not_a_flag(False)
    """Unused since older releases."""

    # Dispatch and compute --------------------------------------------------------------------------------------------

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = flag("allgather", only_with=_MOE)
    """How tokens travel to experts: all tokens to all ranks that share experts (allgather), a copy for each of a
    token's experts to its rank (alltoall), or one for each rank that holds any (flex). The result is the same."""

    moe_enable_deepep: bool = flag(False, only_with=_MOE, no_effect=_NO_DEEPEP)
    """Former spelling of --moe-flex-dispatcher-backend deepep."""

    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] = flag("deepep", only_with=_MOE, no_effect=_NO_DEEPEP)
    """Kernels of the flex dispatcher."""

    moe_deepep_num_sms: int = flag(20, only_with=_MOE, no_effect=_NO_DEEPEP)
    """Multiprocessors that DeepEP takes."""

    moe_hybridep_num_sms: int = flag(16, only_with=_MOE, no_effect=_NO_DEEPEP)
    """Multiprocessors that HybridEP takes."""

    moe_grouped_gemm: bool = flag(False, only_with=_MOE)
    """All experts of a rank in one grouped product."""

    moe_use_legacy_grouped_gemm: bool = flag(
        False, only_with=_MOE, no_effect="grouped experts lie in memory in one way, which checkpoints do not depend on"
    )
    """The older layout of grouped expert weights."""

    moe_permute_fusion: bool = flag(
        False, only_with=_MOE, no_effect="rows are always moved in one pass, on a GPU by a kernel of our own"
    )
    """Reorder tokens in one kernel."""

    moe_apply_probs_on_input: bool = flag(False, only_with=_MOE)
    """Multiply an expert's input, not its activation, by the router's weight. For --moe-router-topk 1."""

    moe_layer_recompute: bool = flag(False, only_with=_MOE)
    """Recompute whole layers of experts in backward, as --recompute-modules moe does."""

    moe_per_layer_logging: bool = flag(False, only_with=_MOE)
    """Log auxiliary losses, and the loads of experts, layer by layer too (to files)."""


def listed(value: Any) -> list[Any]:
    """The things that a field holds which takes one or several."""
    return list(value) if isinstance(value, list | tuple) else [value]
