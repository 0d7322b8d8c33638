"""What a router cannot be made of."""

import math
from collections.abc import Iterator
from typing import Any

from megatron.core.config_fields import too_small
from megatron.core.rank_grid import divisors
from megatron.core.transformer.config.moe import BALANCE_LOSSES, listed


def router_problems(config: Any) -> Iterator[str]:
    """A problem for each value, or pair of values, of which no router can be made."""
    experts, k = config.num_moe_experts, config.moe_router_topk
    if experts is None or experts < 1:  # of which others speak
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
    if config.moe_router_enable_expert_bias and softmax:
        yield "{moe_router_enable_expert_bias:name} needs {moe_router_score_function:name} sigmoid"
    yield from too_small(config, ("moe_z_loss_coeff", "moe_input_jitter_eps", "moe_router_bias_update_rate"), 0)
    yield from _group_problems(config, experts, k)
    yield from _balance_problems(config, sinkhorn)
    yield from _capacity_problems(config)


def _group_problems(config: Any, experts: int, k: int) -> Iterator[str]:
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
        yield f"{{moe_router_num_groups}} does not divide {{num_moe_experts}}; the nearest that does is {near}"
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


def _balance_problems(config: Any, sinkhorn: bool) -> Iterator[str]:
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


def _capacity_problems(config: Any) -> Iterator[str]:
    factor = config.moe_expert_capacity_factor
    if factor is not None and not (0.0 != factor < math.inf):
        yield "{moe_expert_capacity_factor} must be more than 0; 1.0 is an even share, and nothing is dropped without"
    if config.moe_pad_expert_input_to_capacity and (factor is None or factor < 0):
        yield "{moe_pad_expert_input_to_capacity:name} needs {moe_expert_capacity_factor:name}"
