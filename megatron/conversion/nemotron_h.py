"""Nemotron-H: layers of one branch each, Mamba-2, attention, MLP or experts."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import OURS, one_to_one
from megatron.conversion.deepseek import ExpertGroups, NormedProbs
from megatron.conversion.family import HEAD, Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.mamba import AROUND, EMBEDDING, MAMBA_RULES, MIXER, MambaHeads, mamba_layer
from megatron.conversion.spellings import run_of
from megatron.conversion.tensor_mapping import HubTensorPattern, TensorMapping
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import hybrid_letters

# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def _tensors(values: rules.Values) -> TensorMapping:
    """Returns the tables of the kinds of layers that the model has; nothing for a model that is no hybrid."""
    letters = hybrid_letters(run_of(values))
    if letters is None:
        return {}
    tables = [mamba_layer(values)] if "M" in letters else []
    tables += [table for letter, table in _LAYERS.items() if letter in letters]
    tables += [] if values["untie_embeddings_and_output_weights"] else [_TIED]
    return AROUND | {name: patterns for table in tables for name, patterns in table.items()}


_TIED: decoder.Mapping = {
    "embedding.word_embeddings.weight": (HubTensorPattern(EMBEDDING), HubTensorPattern(HEAD, is_copy=True)),
}
"""transformers does not tie the two, so its output layer needs the weight too."""


def _ungated(ours: str, hub: str) -> decoder.Mapping:
    """Returns the mapping of an MLP without gate."""
    return decoder.with_biases({f"{ours}.linear_fc1": f"{hub}.up_proj", f"{ours}.linear_fc2": f"{hub}.down_proj"})


_LAYERS: dict[str, decoder.Mapping] = {
    "*": one_to_one({f"{OURS}.self_attention.linear_proj.weight": f"{MIXER}.o_proj.weight"})
    | decoder.qkv(MIXER, "weight"),
    "-": _ungated(f"{OURS}.mlp", MIXER),
    "E": _ungated(f"{OURS}.mlp.experts", f"{MIXER}.experts.{{expert}}")
    | _ungated(f"{OURS}.mlp.shared_experts", f"{MIXER}.shared_experts")
    | one_to_one(
        {f"{OURS}.mlp.{name}.weight": f"{MIXER}.{name}.weight" for name in ("fc1_latent_proj", "fc2_latent_proj")}
        | {
            f"{OURS}.mlp.router.weight": f"{MIXER}.gate.weight",
            f"{OURS}.mlp.router.expert_bias": f"{MIXER}.gate.e_score_correction_bias",
        }
    ),
}
"""The tables of the layers whose rows are in the same order, by letter of the pattern."""

# ---------------------------------------------------------------------------------------------------------------------
# Settings

_LETTERS: Mapping[str, str] = {
    "linear_attention": "M",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
    "mamba": "M",
    "attention": "*",  # as older releases call them
}


def _pattern(config: Json) -> str:
    """Returns our pattern. Raises UserError for unknown layers, and if the keys contradict each other."""
    kinds, pattern, count = config["layers_block_type"], config.get("hybrid_override_pattern"), "num_hidden_layers"
    if kinds is not None:
        key, unknown = "layers_block_type", [kind for kind in kinds if kind not in _LETTERS]
        letters = "".join(_LETTERS.get(kind, "") for kind in kinds)
    else:
        letters = "ME*-" if pattern is None else pattern  # without either transformers builds one layer of each kind
        key, unknown = "hybrid_override_pattern", [letter for letter in letters if letter not in "M*-E"]
    if unknown:
        known = ", ".join(_LETTERS) if kinds is not None else "M, *, -, E"
        raise UserError(f"{key} has {unknown[0]!r}; {known} are supported")
    if pattern is not None and pattern != letters:
        raise UserError(f"hybrid_override_pattern is {pattern}, but layers_block_type says {letters}")
    if config.get(count) not in (None, len(letters)):
        raise UserError(f"{count} is {config[count]}, but {key} has {len(letters)} layers")
    return letters


@dataclass(frozen=True)
class LayerLetters(rules.Rule):
    """The kind of each layer, as words (`layers_block_type`) or letters (`hybrid_override_pattern`)."""

    reads = ("layers_block_type", "hybrid_override_pattern", "num_hidden_layers")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the pattern and the number of layers."""
        letters = _pattern(config)
        return {"num_layers": len(letters), "hybrid_layer_pattern": letters}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the letters, which all releases read, and the number of layers."""
        letters = hybrid_letters(run_of(values)) or ""
        return {"hybrid_override_pattern": letters, "num_hidden_layers": len(letters)}


@dataclass(frozen=True)
class WithExperts(rules.Rule):
    """Rules that apply if some layers have experts. Otherwise transformers does not look at their keys."""

    of_experts: tuple[rules.Rule, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys of all these rules."""
        return tuple(key for rule in self.of_experts for key in rule.reads)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the fields of all these rules."""
        if "E" not in _pattern(config):
            return {}
        return {name: value for rule in self.of_experts for name, value in rule.fields(config).items()}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the keys of all these rules."""
        if "E" not in (hybrid_letters(run_of(values)) or ""):
            return {}
        return {key: value for rule in self.of_experts for key, value in rule.keys(values).items()}


@dataclass(frozen=True)
class MlpBiases(rules.Rule):
    """Biases of MLPs and shared experts. Those of latent projections have the same key and are unsupported."""

    reads = ("mlp_bias", "moe_latent_size")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the switch and the width of latents."""
        if config["mlp_bias"] and config["moe_latent_size"]:
            raise UserError("mlp_bias is True; with moe_latent_size only False is supported")
        fields = {"mlp_bias": True} if config["mlp_bias"] else {}
        has_latents = "E" in _pattern(config) and config["moe_latent_size"]
        return fields | ({"moe_latent_size": config["moe_latent_size"]} if has_latents else {})

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns both keys."""
        has_bias = values["add_bias_linear"] if values["mlp_bias"] is None else values["mlp_bias"]
        return {"mlp_bias": bool(has_bias), "moe_latent_size": values["moe_latent_size"]}


NEMOTRON_H_FAMILY = Family(
    "NemotronHForCausalLM",
    "nemotron_h",
    _tensors,
    (
        *MAMBA_RULES,
        LayerLetters(),
        MambaHeads("mamba_num_heads", "mamba_head_dim"),
        layer_rules.AttentionHeads(),
        MlpBiases(),
        *rules.copied("max_position_embeddings", "attention_dropout", "hidden_dropout"),
        *rules.copied(ssm_state_size="mamba_state_dim", time_step_min="mamba_min_time_step"),
        rules.Copied("intermediate_size", "ffn_hidden_size"),
        WithExperts(
            (
                *rules.copied("moe_shared_expert_intermediate_size", n_routed_experts="num_moe_experts"),
                *rules.copied(num_experts_per_tok="moe_router_topk", moe_intermediate_size="moe_ffn_hidden_size"),
                rules.Copied("routed_scaling_factor", "moe_router_topk_scaling_factor", unset=1.0),
                rules.Fixed("n_shared_experts", 1),
                ExpertGroups(score_topk=2),
                NormedProbs(),
                rules.Implied({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
            )
        ),
        rules.Implied({"squared_relu": True}),
        rules.TiedEmbeddings(),
        *rules.fixed(attention_bias=False, sliding_window=None, mamba_proj_bias=False, mamba_hidden_act="silu"),
        rules.Fixed("mlp_hidden_act", "relu2"),
        rules.Unused(("expand", "time_step_limit", "rms_norm_eps", "moe_shared_expert_overlap")),
        rules.Unused(("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")),
    ),
    constants=(r"mtp\..*",),  # layers of multi-token prediction, which transformers leaves out too
    old_names=((r"^model\.", "backbone."),),
    copies={HEAD: EMBEDDING},
    unties=True,
)
