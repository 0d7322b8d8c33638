"""Choice of the architecture for an export: the one whose config.json, read back, gives the run's model again."""

from collections.abc import Callable, Sequence

from torch.nn.functional import gelu

from megatron.conversion.config_rules import Values
from megatron.conversion.families import FAMILIES, family_of
from megatron.conversion.family import Family
from megatron.conversion.spellings import in_spelling_of, run_of
from megatron.core.exceptions import UserError
from megatron.core.transformer.config.router import listed
from megatron.core.transformer.layer_patterns import has_mixer
from megatron.training.config.flag_table import flag_table
from megatron.training.config.model import ACTIVATIONS
from megatron.training.config.model_families import NAMES
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.inspection.run_description import (
    ARCHITECTURE,
    MODEL_OPTIONS,
    architecture_differences,
    describe_run,
    words_of,
)
from megatron.training.trained_model import config_for_one_process


def _has_experts_and(holds: Callable[[Values], bool]) -> Callable[[Values], bool]:
    return lambda values: values["num_moe_experts"] is not None and holds(values)


_IN_NO_FAMILY: dict[str, Callable[[Values], bool]] = {
    "Sinkhorn routing (--moe-router-load-balancing-type sinkhorn)": _has_experts_and(
        lambda v: "sinkhorn" in listed(v["moe_router_load_balancing_type"])
    ),
    "a limit of tokens per expert (--moe-expert-capacity-factor)": _has_experts_and(
        lambda v: v["moe_expert_capacity_factor"] is not None and v["moe_expert_capacity_factor"] > 0
    ),
    "random routing (--moe-router-force-load-balancing)": _has_experts_and(
        lambda v: v["moe_router_force_load_balancing"]
    ),
}
"""Settings that no family can express, and whether a run has them.

Either the described architecture (`ARCHITECTURE` in run_description.py) lacks them, because a run may change them when
it resumes, or naming them alone is clearer than a list of all flags that differ.
"""


def choose_family(config: PretrainConfig, architecture: str | None, families: Sequence[Family] = FAMILIES) -> Family:
    """Returns the family of the named architecture, or the first of `families` that expresses the model.

    A family expresses a model if its config.json, read back, gives the same values to all fields that define the
    computed function. Raises UserError naming the flags that no family, or not the named one, can express.
    """
    values = config.flat()
    inexpressible = [what for what, is_set in _IN_NO_FAMILY.items() if is_set(values)]
    if inexpressible:
        known = ", ".join(family.architecture for family in families)
        raise UserError(f"no architecture that can be exported has {' or '.join(inexpressible)}: {known}")
    ours = config.model.model_family or "gpt"
    if architecture is not None:
        candidates = [family_of(architecture, families)]
        if candidates[0].model_family != ours:
            theirs = NAMES[candidates[0].model_family]
            raise UserError(
                f"{architecture} was asked for, which is a {theirs}, but the checkpoint has a {NAMES[ours]}"
            )
    else:
        candidates = [family for family in families if family.model_family == ours and _fits(family, values)]
    if not candidates:
        known = ", ".join(family.architecture for family in families)
        raise UserError(f"no architecture that can be exported is {_kind(NAMES[ours], values)}: {known}")
    losses = [_lost_fields(family, values) for family in candidates]
    near = [family for family, lost in zip(candidates, losses, strict=True) if lost == min(losses)]
    problems = []
    for family in near:
        problems.append(_differences(family, config, values))
        if not problems[-1]:
            return family
    nearest = min(range(len(near)), key=lambda index: len(problems[index]))
    name = near[nearest].architecture
    subject = f"{name} was asked for" if architecture is not None else f"{name} is the nearest architecture"
    raise UserError(f"{subject}, but: {'; '.join(problems[nearest])}")


def _fits(family: Family, values: Values) -> bool:
    """Whether a family has the parts that the model has: naming these alone is clearer than a list of the many flags
    that differ. A family without any table for the values does not fit."""
    names = family.tensors_of(values)
    parts = ((tensor, has(values)) for _, tensor, has in _PARTS)
    return bool(names) and all(any(tensor in name for name in names) == has_part for tensor, has_part in parts)


_PARTS: tuple[tuple[str, str, Callable[[Values], bool]], ...] = (
    ("latent attention (--multi-latent-attention)", "linear_kv_down_proj", lambda v: v["multi_latent_attention"]),
    ("Mamba-2 layers (--hybrid-layer-pattern)", ".norm_weight", lambda v: has_mixer(run_of(v), "mamba")),
    (
        "delta nets (--experimental-attention-variant, --hybrid-layer-pattern)",
        ".out_norm",
        lambda v: has_mixer(run_of(v), "gated_delta_net"),
    ),
    (
        "sparse attention (--experimental-attention-variant, --hybrid-layer-pattern)",
        ".indexer",
        lambda v: has_mixer(run_of(v), "dsa"),
    ),
    ("multi-token prediction (--mtp-num-layers)", ".eh_proj", lambda v: bool(v["mtp_num_layers"])),
    ("experts (--num-experts)", "router", lambda v: v["num_moe_experts"] is not None),
)
"""Parts of models, a tensor by which a family shows that it has the part, and whether a model has it."""


def _kind(name: str, values: Values) -> str:
    parts = [what for what, _, has in _PARTS if has(values)]
    if values["num_moe_experts"] is None:
        return f"a {name} " + "".join(f"with {part} and " for part in parts) + "without experts"
    return f"a {name} " + " and ".join(f"with {part}" for part in parts)


def _lost_fields(family: Family, values: Values) -> int:
    """Returns the number of fields in config.json that differ when it is read back; a family that expresses the model
    has none. Building the config that was read back would find all differences, but takes much longer."""
    try:
        read_back = in_spelling_of(values, family.fields_of(family.config_of(values)))
    except UserError as error:
        return len(str(error).splitlines())
    read_back = dict.fromkeys(ACTIVATIONS, False) | read_back
    return sum(name in _OF_THE_FUNCTION and value != values.get(name) for name, value in read_back.items())


_OF_THE_FUNCTION = frozenset((*ARCHITECTURE, *MODEL_OPTIONS, *ACTIVATIONS))


def _differences(family: Family, config: PretrainConfig, values: Values) -> list[str]:
    """Returns a sentence for each flag whose value is lost when the family's config.json is read back."""
    try:
        read_back = in_spelling_of(values, family.fields_of(family.config_of(values)))
        words = [word for name, value in read_back.items() for word in words_of(flag_table()[name], value)]
        described = {"command_line": [*_any_run(values), *words], "model_family": family.model_family}
        again = config_for_one_process(described, [], has_cuda=False)
    except UserError as error:
        return str(error).splitlines()
    if _has_approximate_gelu(config) != _has_approximate_gelu(again):
        return [f"{family.architecture} has exact GELU, which needs --no-bias-gelu-fusion"]
    if _has_expert_bias(config) != _has_expert_bias(again):
        has = "has" if _has_expert_bias(again) else "has no"
        return [f"{family.architecture} {has} biases that balance experts (--moe-router-enable-expert-bias)"]
    return [
        sentence.replace("in this run", f"for {family.architecture}")
        for sentence in architecture_differences(again, describe_run(config))
    ]


def _has_approximate_gelu(config: PretrainConfig) -> bool:
    """Whether --bias-gelu-fusion makes the layers compute GELU's tanh approximation. The described architecture lacks
    it."""
    transformer = config.transformer
    is_gelu = transformer.activation_func is gelu and not transformer.gated_linear_unit
    return is_gelu and transformer.bias_activation_fusion


def _has_expert_bias(config: PretrainConfig) -> bool:
    """Whether biases of scores balance experts. The described architecture lacks them, because a run may turn them on
    when it resumes."""
    return config.transformer.num_moe_experts is not None and config.transformer.moe_router_enable_expert_bias


def _any_run(values: Values) -> list[str]:
    """Returns flags that every run needs and that do not describe the model."""
    tokenizer = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "1")
    words = ["--micro-batch-size", "1", "--seq-length", str(values["seq_length"]), *tokenizer]
    length = values["decoder_seq_length"] if values["model_family"] == "t5" else None
    return words if length is None else [*words, "--decoder-seq-length", str(length)]
