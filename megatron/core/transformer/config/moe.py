"""Mixture of experts: layers, experts, dispatch. The router's fields are in `router.py`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.core.declarations.config_fields import flag, pattern_problems, too_small
from megatron.core.declarations.flag_grammars import layer_pattern
from megatron.core.groups.rank_grid import divisors, parallel_sizes_near

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_MOE = "num_moe_experts"
_SHARED = "moe_shared_expert_intermediate_size"
_NO_DEEPEP = "tokens travel by the all-to-all of torch.distributed, without kernels of DeepEP or HybridEP"
_EXPERT_SIZES = ("num_moe_experts", "moe_ffn_hidden_size", "moe_latent_size", "moe_shared_expert_intermediate_size")


@dataclass(kw_only=True)
class MoEConfig:
    """Layers of experts, and how tokens get to them. Has no effect without num_moe_experts."""

    num_moe_experts: int | None = flag(None, on="--num-experts")
    """Number of experts of a mixture-of-experts layer."""

    moe_layer_freq: int | list[int] = flag(1, parse=layer_pattern, only_with=_MOE)
    """Layers with experts: every N-th, or a list expression with a 1 for each of them, such as ([0]*3+[1]*58)."""

    moe_ffn_hidden_size: int | None = flag(None, only_with=_MOE)
    """Inner width of one expert. Default: --ffn-hidden-size."""

    moe_expert_mlp_bias: bool | None = flag(
        None, on="--moe-expert-mlp-bias", off="--no-moe-expert-mlp-bias", only_with=_MOE
    )
    """Give the linear layers of experts a bias, or not; without the flag, --disable-bias-linear decides."""

    moe_latent_size: int | None = flag(None, only_with=_MOE)
    """Width to which tokens are projected before they are dispatched, and at which experts compute."""

    moe_shared_expert_intermediate_size: int | None = flag(None, only_with=_MOE)
    """Total inner width of the shared experts, which process every token."""

    moe_shared_expert_gate: bool = flag(False, only_with=_SHARED)
    """Multiply the output of the shared experts by a learnt gate."""

    moe_shared_expert_overlap: bool = flag(False, only_with=_SHARED)
    """Compute the shared experts while tokens are sent to the other experts and back, in forward and backward."""

    # Upcycling -------------------------------------------------------------------------------------------------------

    moe_use_upcycling: bool = False
    """Start from a checkpoint of a dense model in --load or --pretrained-checkpoint; each expert is a copy of its MLP.
    The new model is saved under --save. If the run is started again, it continues from there."""

    moe_upcycling_granularity: int = flag(1, only_with="moe_use_upcycling")
    """With --moe-use-upcycling: number of experts into which the inner channels of the dense MLP are divided.
    --moe-ffn-hidden-size must be the dense --ffn-hidden-size divided by this number, which must divide --num-experts
    and --moe-router-topk."""

    # Dispatch and compute --------------------------------------------------------------------------------------------

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = flag("allgather", only_with=_MOE)
    """How tokens get to their experts: every token to all ranks that share the experts (allgather), one copy per expert
    of the token (alltoall), or one copy per rank that has any of its experts (flex). The result is the same."""

    moe_enable_deepep: bool = flag(False, only_with=_MOE, no_effect=_NO_DEEPEP)
    """Former spelling of --moe-flex-dispatcher-backend deepep."""

    moe_flex_dispatcher_backend: Literal["deepep", "hybridep", "ncclep"] = flag(
        "deepep", only_with=_MOE, no_effect=_NO_DEEPEP
    )
    """Kernels of the flex dispatcher."""

    moe_deepep_num_sms: int = flag(20, only_with=_MOE, no_effect=_NO_DEEPEP)
    """Number of multiprocessors for DeepEP."""

    moe_hybridep_num_sms: int = flag(16, only_with=_MOE, no_effect=_NO_DEEPEP)
    """Number of multiprocessors for HybridEP."""

    moe_grouped_gemm: bool = flag(False, only_with=_MOE)
    """Compute all experts of a rank in one grouped matrix product. In fp8 this is always so."""

    moe_use_legacy_grouped_gemm: bool = flag(
        False, only_with=_MOE, no_effect="grouped experts have one memory layout, and checkpoints do not depend on it"
    )
    """Use the older memory layout of grouped expert weights."""

    moe_permute_fusion: bool = flag(
        False, only_with=_MOE, no_effect="rows are always moved in one pass, on a GPU by our own kernel"
    )
    """Reorder tokens in one kernel."""

    moe_apply_probs_on_input: bool = flag(False, only_with=_MOE)
    """Multiply the input of an expert, not its activation, by the router's weight. Needs --moe-router-topk 1."""

    moe_layer_recompute: bool = flag(False, only_with=_MOE)
    """Recompute whole mixture-of-experts layers in backward, as --recompute-modules moe does."""

    moe_per_layer_logging: bool = flag(False, only_with=_MOE)
    """Log auxiliary losses and expert loads for each layer too (to files, not the console)."""


def validate(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for each impossible value, or pair of values, of layers of experts; `config` has the fields of
    TransformerConfig."""
    if config.num_moe_experts is None:
        if config.expert_model_parallel_size > 1:
            yield "{expert_model_parallel_size} spreads experts over ranks: it needs {num_moe_experts:name}"
        if config.moe_use_upcycling:
            yield "{moe_use_upcycling:name} makes experts of an MLP: it needs {num_moe_experts:name}"
        return
    yield from too_small(config, _EXPERT_SIZES, 1)
    yield from pattern_problems(config, "moe_layer_freq", "with experts")
    yield from _shares(config)
    if config.moe_use_upcycling:
        yield from _upcycling_problems(config)
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        yield (
            "{moe_apply_probs_on_input:name} multiplies the inputs of experts, which equals weighted outputs only "
            "if each token goes to one expert: it needs {moe_router_topk:name} 1"
        )


def _upcycling_problems(config: "TransformerConfig") -> Iterator[str]:
    parts = config.moe_upcycling_granularity
    if parts < 1:
        yield "{moe_upcycling_granularity} must be at least 1"
        return
    for name in ("num_moe_experts", "moe_router_topk"):
        if getattr(config, name) % parts:
            yield f"{{moe_upcycling_granularity}} does not divide {{{name}}}"
    experts, groups = config.num_moe_experts or 0, config.moe_router_num_groups
    if groups and not experts % groups and experts // groups % parts:
        yield (
            f"{{moe_upcycling_granularity}} does not divide the {experts // groups} experts of a group "
            "({moe_router_num_groups}), so the parts of one MLP would lie in two groups"
        )
    dense = config.ffn_hidden_size or 4 * (config.hidden_size or 0)
    if (config.moe_ffn_hidden_size or dense) * parts != dense:
        yield (
            f"{{moe_upcycling_granularity:name}} {parts} cuts the {dense} channels of the dense MLP "
            f"({{ffn_hidden_size:name}}) into parts of {dense // parts}: {{moe_ffn_hidden_size}} must be that"
        )
    for name in ("moe_latent_size", "moe_shared_expert_intermediate_size"):
        if getattr(config, name) is not None:
            yield f"{{{name}}} does not go with {{moe_use_upcycling:name}}: a dense model has no such part"


def _shares(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem unless every expert parallel rank gets whole experts, and the ranks that share an expert equal
    numbers of channels."""
    experts, expert = config.num_moe_experts or 0, config.expert_model_parallel_size
    if experts >= 1 and expert >= 1 and experts % expert:
        near = parallel_sizes_near(divisors(experts), expert, config)
        yield f"{{expert_model_parallel_size}} does not divide {{num_moe_experts}}; use {near}"
    dense = config.tensor_model_parallel_size
    tensor = config.expert_tensor_parallel_size or dense
    width = config.moe_ffn_hidden_size or config.ffn_hidden_size or 4 * (config.hidden_size or 0)
    if tensor >= 1 and width >= 1 and width % tensor:
        near = parallel_sizes_near(divisors(width), tensor, config)
        ranks = (
            "{expert_tensor_parallel_size}" if config.expert_tensor_parallel_size else "{tensor_model_parallel_size}"
        )
        what = "{moe_ffn_hidden_size}" if config.moe_ffn_hidden_size else f"the {width} channels of an expert"
        yield f"{ranks} does not divide {what}; use {near}"
    shared = config.moe_shared_expert_intermediate_size
    if shared is not None and shared >= 1 and dense >= 1 and shared % dense:
        near = parallel_sizes_near(divisors(shared), dense, config)
        yield f"{{tensor_model_parallel_size}} does not divide {{moe_shared_expert_intermediate_size}}; use {near}"
