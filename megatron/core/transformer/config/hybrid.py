"""Hybrid models: layers of one branch each, in the order of a pattern, and the sizes of Mamba-2 layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.core.declarations.config_fields import flag, literal_text, too_small
from megatron.core.groups.rank_grid import divisors
from megatron.core.transformer.layer_patterns import (
    HYBRID_LAYERS,
    PREDICTION_BORDER,
    STAGE_BORDER,
    hybrid_letters,
    parts_of_letters,
    prediction_letters,
    stages_of_pattern,
)

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_HYBRID = "hybrid_layer_pattern"


@dataclass(kw_only=True)
class HybridConfig:
    """The layers of a hybrid model and the sizes of its Mamba-2 layers."""

    hybrid_layer_pattern: str | None = flag(None, from_checkpoint=True)
    """Make a hybrid model: one letter for each layer, M (Mamba-2), G (gated delta net), * (attention), D (sparse
    attention), - (MLP) or E (experts). Each layer consists of its norm, this one part and a residual. A | ends a
    pipeline stage. After the layers, each depth of multi-token prediction has a / and its letters: M-M*-/*E/*E predicts
    two more tokens. A depth is one letter, or one of M G * D followed by - or E."""

    is_hybrid_model: bool | None = flag(None, on="--is-hybrid-model")
    """Make a hybrid model; without --hybrid-layer-pattern and ratios all its layers are Mamba-2 layers."""

    mamba_state_dim: int = flag(128, only_with=_HYBRID)
    """Number of values that the state of a Mamba-2 layer keeps for each channel."""

    mamba_head_dim: int = flag(64, only_with=_HYBRID)
    """Channels of one head of a Mamba-2 layer."""

    mamba_num_groups: int = flag(8, only_with=_HYBRID)
    """Groups of heads of a Mamba-2 layer. Heads of a group share B and C (the vectors that write and read their states)
    and one norm. Tensor and context parallel ranks divide the groups."""

    mamba_num_heads: int | None = flag(None, only_with=_HYBRID)
    """Heads of a Mamba-2 layer. Default: 2 * hidden size / --mamba-head-dim."""

    mamba_conv_kernel_dim: int = flag(4, only_with=_HYBRID)
    """Number of tokens that the convolution of a Mamba-2 layer reads, including the current one."""

    mamba_min_time_step: float = flag(0.0, only_with=_HYBRID)
    """Smallest step size of a Mamba-2 layer; smaller ones are raised to it."""

    mamba_training_ssm_states_dtype: Literal["fp32", "bf16"] | None = flag(
        None, only_with=_HYBRID, group="number formats, seed and ranks"
    )
    """Type in which Mamba-2 layers keep their states between chunks of 128 tokens for backward. The states pass from
    chunk to chunk in float32. Default: fp32 (float64 in a model of that type). Kernels of a GPU keep no states, but
    compute them again; products read them in bf16."""

    use_mamba_mem_eff_path: bool = flag(
        True,
        off="--disable-mamba-mem-eff-path",
        no_effect="--recompute-granularity chooses what a Mamba-2 layer keeps for backward",
    )
    """Compute Mamba-2 layers in one fused kernel."""


def mamba_heads(config: "TransformerConfig") -> int:
    """Returns the number of heads of a Mamba-2 layer."""
    return int(config.mamba_num_heads or 2 * config.hidden_size // config.mamba_head_dim)


def validate(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for each impossible value of `HybridConfig`; `config` has the fields of TransformerConfig."""
    letters = hybrid_letters(config)
    if letters is None:
        return
    unknown = sorted(set(letters + "".join(prediction_letters(config))) - set(HYBRID_LAYERS))
    if unknown:
        yield f"{{hybrid_layer_pattern}}: {literal_text(_unknown(unknown[0]))}"
        return
    if config.num_layers and len(letters) != config.num_layers:
        yield (
            f"{{hybrid_layer_pattern}} has {len(letters)} layers, {{num_layers}}; give one letter for each layer, or "
            "leave {num_layers:name} out"
        )
    marked = stages_of_pattern(config.hybrid_layer_pattern)
    if marked is not None and config.pipeline_model_parallel_layout not in (None, marked):
        yield (
            "{pipeline_model_parallel_layout} does not go with a | in {hybrid_layer_pattern}, which ends a stage too; "
            "give one of the two"
        )
    yield from _prediction_problems(config)
    yield from _expert_problems(config, letters + "".join(prediction_letters(config)))
    if config.norm_placement.startswith("parallel"):
        yield "{norm_placement}: layers of a {hybrid_layer_pattern:name} have one branch each; pre works"
    if config.use_mup:
        yield "{use_mup}: not yet with {hybrid_layer_pattern:name}; leave it out"
    if getattr(config, "experimental_attention_variant", None) is not None:
        yield "{experimental_attention_variant} does not go with {hybrid_layer_pattern:name}; use its letters"
    if getattr(config, "num_encoder_layers", None):
        yield "{hybrid_layer_pattern:name}: a model with an encoder has layers of attention and MLP; leave it out"
    if "M" in letters and (config.hidden_size or 0) >= 1:
        yield from _mamba_problems(config)


def _prediction_problems(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem unless the depths of multi-token prediction are equal, have one layer each, and match
    `mtp_num_layers`."""
    depths = prediction_letters(config)
    if len(depths) != (config.mtp_num_layers or 0):
        yield (
            f"{{hybrid_layer_pattern}} has {len(depths)} depths of multi-token prediction, {{mtp_num_layers}}; give "
            f"letters after a {PREDICTION_BORDER} for each, such as {PREDICTION_BORDER}*-"
        )
    elif depths and (len(set(depths)) > 1 or parts_of_letters(depths[0]) is None):
        yield (
            f"{{hybrid_layer_pattern}}: not yet: {PREDICTION_BORDER.join(depths)} as depths of multi-token prediction; "
            "all must be equal: one letter, or one of M G * D followed by - or E"
        )


def _unknown(letter: str) -> str:
    known = ", ".join(f"{known} ({parts.token_mixer or parts.channel_mixer})" for known, parts in HYBRID_LAYERS.items())
    return f"{letter!r} is no layer; the letters are {known}, and {STAGE_BORDER} between pipeline stages"


def _expert_problems(config: "TransformerConfig", letters: str) -> Iterator[str]:
    experts = config.num_moe_experts is not None
    if "E" in letters and not experts:
        yield "{hybrid_layer_pattern} has layers of experts (E); {num_moe_experts:name} says how many experts they have"
    if experts and "E" not in letters:
        yield "{num_moe_experts}: {hybrid_layer_pattern} has no layer of experts (E)"
    if config.moe_layer_freq not in (None, 1):
        yield "{moe_layer_freq} does not go with {hybrid_layer_pattern:name}, whose letters E are the layers of experts"


def _mamba_problems(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem unless the heads of a Mamba-2 layer divide into its groups, and these over the ranks."""
    sizes = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "mamba_conv_kernel_dim")
    problems = [*too_small(config, sizes, 1), *too_small(config, ("mamba_min_time_step",), 0)]
    if problems:
        yield from problems
        return
    heads, groups = mamba_heads(config), config.mamba_num_groups
    tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
    if config.mamba_num_heads is None and 2 * config.hidden_size % config.mamba_head_dim:
        yield (
            f"{{mamba_head_dim}} does not divide the {2 * config.hidden_size} channels of a Mamba-2 layer, twice "
            "{hidden_size}; give another one, or {mamba_num_heads:name}"
        )
    elif heads % groups:
        nearest = min(divisors(heads), key=lambda divisor: abs(divisor - groups))
        yield f"{{mamba_num_groups}} does not divide the {heads} heads of a Mamba-2 layer; use {nearest}"
    elif tensor >= 1 and groups % tensor:
        nearest = max(size for size in divisors(groups) if size < tensor)
        yield (
            f"{{tensor_model_parallel_size}} does not divide {{mamba_num_groups}}, the groups of heads of a Mamba-2 "
            f"layer; use {nearest}"
        )
    elif tensor >= 1 and context >= 1 and groups // tensor % context:
        nearest = max(size for size in divisors(groups // tensor) if size < context)
        yield (
            f"{{context_parallel_size}} does not divide the {groups // tensor} groups of a Mamba-2 layer "
            f"({{mamba_num_groups:name}}) on a tensor parallel rank; use {nearest}"
        )
