"""Router of a mixture of experts: scores, choice of experts, balance, capacity."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron.core.declarations.config_fields import flag, not_a_flag, too_small
from megatron.core.groups.rank_grid import divisors

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_MOE = "num_moe_experts"
BALANCE_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_BALANCING = (*BALANCE_LOSSES, "sinkhorn", "none")
_OTHER_BALANCING = {
    "quantile_balancing": "there is no such rule; give none with --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias, which balances by a bias of each expert too"
}


@dataclass(kw_only=True)
class RouterConfig:
    """Choice of the experts of a token. Has no effect without num_moe_experts."""

    moe_router_topk: int = flag(2, only_with=_MOE)
    """Number of experts that a token is sent to."""

    moe_router_load_balancing_type: str | list[str] = flag(
        "aux_loss", nargs="+", words={word: word for word in _BALANCING}, only_with=_MOE, hints=_OTHER_BALANCING
    )
    """How the load of experts is balanced: by one or several auxiliary losses over the micro-batch (aux_loss), each
    sequence (seq_aux_loss) or the global batch so far (global_aux_loss); by Sinkhorn assignment over the micro-batch
    (sinkhorn); or not at all (none). Only global_aux_loss depends on the layout: it counts the micro-batches of all
    data parallel ranks up to the current one."""

    moe_aux_loss_coeff: float | list[float] = flag(0.0, nargs="+", only_with=_MOE)
    """Coefficient of the auxiliary loss: one per type, or one for all."""

    moe_z_loss_coeff: float | None = flag(None, only_with=_MOE)
    """Coefficient of the loss that keeps router logits small (z-loss)."""

    moe_router_score_function: Literal["softmax", "sigmoid"] = flag(
        "softmax",
        only_with=_MOE,
        hints={"sqrtsoftplus": "there is no such score; give sigmoid, which scores each expert by itself too"},
    )
    """Function from router logits to scores."""

    moe_router_pre_softmax: bool = flag(False, only_with=_MOE)
    """Apply the softmax to all experts before the top k are chosen, instead of to the chosen experts."""

    moe_router_topk_scaling_factor: float | None = flag(None, only_with=_MOE)
    """Factor of the scores of the chosen experts."""

    moe_router_norm_topk_prob: bool | None = flag(
        None, on="--moe-router-norm-topk-prob", off="--no-moe-router-norm-topk-prob", only_with=_MOE
    )
    """Divide the scores of the chosen experts by their sum, or not. Default: divide sigmoid scores if several experts
    are chosen, but not softmax scores."""

    moe_router_bias: bool | None = flag(None, on="--moe-router-bias", off="--no-moe-router-bias", only_with=_MOE)
    """Give the router's logits a bias, or not; without the flag, --disable-bias-linear decides."""

    moe_router_dtype: Literal["fp32", "fp64"] | None = flag(None, only_with=_MOE)
    """Number type that the router computes in, at least. Default: the type of the model."""

    moe_router_num_groups: int | None = flag(None, only_with=_MOE)
    """Number of groups of experts; a token first chooses groups, then experts within them."""

    moe_router_group_topk: int | None = flag(None, only_with=_MOE)
    """Number of groups that a token chooses."""

    moe_router_group_score_topk: int | None = flag(None, only_with=_MOE)
    """Number of a group's best scores whose sum is the score of the group: 1 for DeepSeek-V2, 2 for DeepSeek-V3.
    Default: --moe-router-topk / --moe-router-group-topk."""

    moe_router_topk_limited_devices: int | None = not_a_flag(None)
    """Number of expert parallel ranks that a token can be sent to. Refused, because the choice of experts would depend
    on the layout."""

    moe_router_enable_expert_bias: bool = flag(False, only_with=_MOE)
    """Balance the load without a loss: a bias of each expert's score, adjusted after every step."""

    moe_router_bias_update_rate: float = flag(0.001, only_with="moe_router_enable_expert_bias")
    """Size of the adjustment of that bias."""

    moe_router_force_load_balancing: bool = flag(False, only_with=_MOE)
    """Route by random logits, for benchmarks; gradients flow to the router's own logits."""

    moe_router_padding_for_quantization: bool | None = flag(
        False,
        only_with=_MOE,
        no_effect="products of fp8 experts accept any number of rows and pad transposed matrices themselves",
    )
    """Pad each expert's tokens to the size that fp8 and fp4 products need."""

    moe_router_padding_for_fp8: bool | None = flag(
        False,
        only_with=_MOE,
        no_effect="products of fp8 experts accept any number of rows and pad transposed matrices themselves",
    )
    """Former spelling of --moe-router-padding-for-quantization."""

    moe_router_fusion: bool = flag(
        False, only_with=_MOE, no_effect="the router's kernels are chosen with their backend; its result is the same"
    )
    """Compute the router in one kernel."""

    moe_enable_routing_replay: bool = flag(False, only_with=_MOE)
    """Let a script record the experts that routers choose, and replay them (`router_replays` in
    megatron.core.transformer.moe.router_replay). The flag alone changes nothing."""

    moe_input_jitter_eps: float | None = flag(None, only_with=_MOE)
    """In training, multiply the router's input by random factors between 1 - eps and 1 + eps."""

    # Capacity --------------------------------------------------------------------------------------------------------

    moe_expert_capacity_factor: float | None = flag(None, only_with=_MOE)
    """Capacity of an expert, as a multiple of an even share of the micro-batch's tokens (on all tensor and context
    parallel ranks together); further tokens are dropped. Default and negative numbers: no limit."""

    moe_pad_expert_input_to_capacity: bool = flag(
        False,
        only_with=_MOE,
        no_effect="padding does not change the result; experts compute only the tokens that they accept",
    )
    """Pad the tokens of each expert to its capacity."""

    moe_token_drop_policy: Literal["probs", "position"] = flag("probs", only_with="moe_expert_capacity_factor")
    """Tokens to drop: those with the smallest router weights (probs), or the last ones of the micro-batch (position: by
    position, then by row)."""

    moe_token_dropping: bool = not_a_flag(False)
    """Unused since older releases."""


def validate(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for each impossible value, or pair of values, of routers; `config` has the fields of
    TransformerConfig."""
    experts, k = config.num_moe_experts, config.moe_router_topk
    if experts is None or experts < 1:  # moe.validate reports it
        return
    if not 1 <= k <= experts:
        yield "{moe_router_topk} must be from 1 to {num_moe_experts}"
        return
    softmax = config.moe_router_score_function == "softmax"
    late = softmax and not config.moe_router_pre_softmax
    sinkhorn = "sinkhorn" in listed(config.moe_router_load_balancing_type)
    if late and k == 1 and not sinkhorn:
        yield (
            "{moe_router_topk} with {moe_router_score_function}: the softmax of one number is 1 and teaches the router "
            "nothing; set {moe_router_pre_softmax:name}"
        )
    if late and config.moe_router_norm_topk_prob is False:
        yield (
            "{moe_router_norm_topk_prob:name} False: the softmax over the picked experts sums to 1; set "
            "{moe_router_pre_softmax:name}"
        )
    if config.moe_router_enable_expert_bias and late:
        yield (
            "{moe_router_enable_expert_bias:name} needs {moe_router_score_function:name} sigmoid or "
            "{moe_router_pre_softmax:name}"
        )
    yield from too_small(config, ("moe_z_loss_coeff", "moe_input_jitter_eps", "moe_router_bias_update_rate"), 0)
    yield from _group_problems(config, experts, k)
    yield from _balance_problems(config, sinkhorn)
    yield from _capacity_problems(config)


def _group_problems(config: "TransformerConfig", experts: int, k: int) -> Iterator[str]:
    if getattr(config, "moe_router_topk_limited_devices", None) is not None:
        yield (
            "{moe_router_topk_limited_devices} would make a token's experts depend on the number of expert parallel "
            "ranks; set {moe_router_num_groups:name} to that number and {moe_router_group_topk:name} to this one"
        )
    groups, kept, counted = (
        config.moe_router_num_groups,
        config.moe_router_group_topk,
        config.moe_router_group_score_topk,
    )
    if groups is None and kept is None:
        if counted is not None:
            yield "{moe_router_group_score_topk} needs {moe_router_num_groups:name}"
        return
    if groups is None or kept is None:
        yield "{moe_router_num_groups} and {moe_router_group_topk} go together"
        return
    if groups < 1 or experts % groups:
        near = min(divisors(experts), key=lambda size: abs(size - groups))
        yield f"{{moe_router_num_groups}} does not divide {{num_moe_experts}}; use {near}"
        return
    size = experts // groups
    if not 1 <= kept <= groups:
        yield "{moe_router_group_topk} must be from 1 to {moe_router_num_groups}"
    elif k > kept * size:
        yield f"{{moe_router_topk}} is more than the {kept * size} experts of {{moe_router_group_topk}} groups"
    elif counted is None and k < kept:
        yield (
            "{moe_router_topk} is less than {moe_router_group_topk}: a group's score would be a sum of none of its "
            "experts' scores; set {moe_router_group_score_topk:name} 1"
        )
    elif not 1 <= (counted or k // kept) <= size:
        works = f"set {{moe_router_group_score_topk:name}} to at most {size}"
        if counted is None:
            yield f"{{moe_router_topk}}: a group's score would be the sum of {k // kept} of its {size} experts; {works}"
        else:
            yield f"{{moe_router_group_score_topk}}: a group has {size} experts; {works}"


def _balance_problems(config: "TransformerConfig", sinkhorn: bool) -> Iterator[str]:
    kinds, weights = listed(config.moe_router_load_balancing_type), listed(config.moe_aux_loss_coeff)
    if len(weights) not in (1, len(kinds)):
        yield "{moe_aux_loss_coeff} must be one number for each of {moe_router_load_balancing_type}"
    if len(set(kinds)) != len(kinds):
        yield "{moe_router_load_balancing_type} has a type twice"
    if any(not 0.0 <= weight < math.inf for weight in weights):
        yield "{moe_aux_loss_coeff} must be at least 0"
    if len(kinds) > 1 and any(kind not in BALANCE_LOSSES for kind in kinds):
        yield f"{{moe_router_load_balancing_type}}: only losses go together: {', '.join(BALANCE_LOSSES)}"
    if not sinkhorn:
        return
    if any(weights):
        yield "{moe_aux_loss_coeff} with {moe_router_load_balancing_type}: sinkhorn has no loss; leave it out"
    for name in ("moe_router_num_groups", "moe_router_topk_scaling_factor", "moe_router_norm_topk_prob"):
        if getattr(config, name) is not None:
            yield f"{{{name}}} does not go with {{moe_router_load_balancing_type}}; leave it out"
    if config.moe_router_score_function != "softmax":
        yield "{moe_router_score_function} does not go with {moe_router_load_balancing_type}; leave it out"
    if config.moe_enable_routing_replay:
        yield (
            "{moe_enable_routing_replay:name} does not go with {moe_router_load_balancing_type}, whose choice is not "
            "recorded; leave it out"
        )


def _capacity_problems(config: "TransformerConfig") -> Iterator[str]:
    factor = config.moe_expert_capacity_factor
    if factor is not None and not (0.0 != factor < math.inf):
        yield "{moe_expert_capacity_factor} must be more than 0; 1.0 is an even share; unset, no token is dropped"
    if config.moe_pad_expert_input_to_capacity and (factor is None or factor < 0):
        yield "{moe_pad_expert_input_to_capacity:name} needs {moe_expert_capacity_factor:name}"


def listed(value: Any) -> list[Any]:
    """Returns the values of a field that takes one value or several."""
    return list(value) if isinstance(value, list | tuple) else [value]
