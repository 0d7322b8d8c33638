"""The architectures of transformers that can be converted, as data."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.exceptions import UserError
from megatron.training.conversion.config_rules import (
    AttentionHeads,
    Copied,
    ExpertLayers,
    Fixed,
    Implied,
    LinearBiases,
    NoWindows,
    RouterWeights,
    Rule,
    SlidingWindows,
    TiedEmbeddings,
    Values,
)
from megatron.training.conversion.hub_defaults import Json, with_defaults
from megatron.training.conversion.rope import RotaryPositions
from megatron.training.conversion.tensor_mapping import (
    GATE,
    KEYS,
    QUERIES,
    UP,
    VALUES,
    HubTensorPattern,
    TensorMapping,
)

# ---------------------------------------------------------------------------------------------------------------------
# Tensors

_Mapping = dict[str, tuple[HubTensorPattern, ...]]

_OURS, _HUB = "decoder.layers.{layer}", "model.layers.{layer}"

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_AROUND: _Mapping = {
    "embedding.word_embeddings.weight": (HubTensorPattern(EMBEDDING),),
    "decoder.final_layernorm.weight": (HubTensorPattern("model.norm.weight"),),
    "output_layer.weight": (HubTensorPattern(HEAD),),
    f"{_OURS}.input_layernorm.weight": (HubTensorPattern(f"{_HUB}.input_layernorm.weight"),),
    f"{_OURS}.pre_mlp_layernorm.weight": (HubTensorPattern(f"{_HUB}.post_attention_layernorm.weight"),),
}


def _qkv(kind: str) -> tuple[HubTensorPattern, ...]:
    parts = {"q": QUERIES, "k": KEYS, "v": VALUES}
    return tuple(HubTensorPattern(f"{_HUB}.self_attn.{name}_proj.{kind}", part) for name, part in parts.items())


_ATTENTION: _Mapping = {
    f"{_OURS}.self_attention.linear_qkv.weight": _qkv("weight"),
    f"{_OURS}.self_attention.linear_proj.weight": (HubTensorPattern(f"{_HUB}.self_attn.o_proj.weight"),),
}
_QKV_BIAS: _Mapping = {f"{_OURS}.self_attention.linear_qkv.bias": _qkv("bias")}
_OUTPUT_BIAS: _Mapping = {
    f"{_OURS}.self_attention.linear_proj.bias": (HubTensorPattern(f"{_HUB}.self_attn.o_proj.bias"),)
}
_HEAD_NORMS: _Mapping = {
    f"{_OURS}.self_attention.q_layernorm.weight": (HubTensorPattern(f"{_HUB}.self_attn.q_norm.weight"),),
    f"{_OURS}.self_attention.k_layernorm.weight": (HubTensorPattern(f"{_HUB}.self_attn.k_norm.weight"),),
}


def _gated(ours: str, hub: str, gate: str, up: str, down: str) -> _Mapping:
    return {
        f"{ours}.linear_fc1.{kind}": (
            HubTensorPattern(f"{hub}.{gate}.{kind}", GATE),
            HubTensorPattern(f"{hub}.{up}.{kind}", UP),
        )
        for kind in ("weight", "bias")
    } | {f"{ours}.linear_fc2.{kind}": (HubTensorPattern(f"{hub}.{down}.{kind}"),) for kind in ("weight", "bias")}


_MLP = _gated(f"{_OURS}.mlp", f"{_HUB}.mlp", "gate_proj", "up_proj", "down_proj")


def _experts(block: str, gate: str, up: str, down: str) -> _Mapping:
    hub = f"{_HUB}.{block}"
    router = {f"{_OURS}.mlp.router.weight": (HubTensorPattern(f"{hub}.gate.weight"),)}
    return router | _gated(f"{_OURS}.mlp.experts", f"{hub}.experts.{{expert}}", gate, up, down)


# ---------------------------------------------------------------------------------------------------------------------
# Settings

_DECODER: tuple[Rule, ...] = (
    Copied("num_hidden_layers", "num_layers"),
    Copied("hidden_size", "hidden_size"),
    Copied("max_position_embeddings", "max_position_embeddings"),
    Fixed("hidden_act", "silu"),
    Implied({"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "hidden_dropout": 0.0}),
    Copied("attention_dropout", "attention_dropout"),
    Copied("initializer_range", "init_method_std"),
    TiedEmbeddings(),
    Copied("intermediate_size", "ffn_hidden_size"),
    Copied("rms_norm_eps", "layernorm_epsilon"),
    AttentionHeads(),
    RotaryPositions(),
)

_ABOUT_FILES = ("_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype", "vocab_size")
_ABOUT_USE = ("bos_token_id", "eos_token_id", "pad_token_id", "output_attentions", "output_hidden_states", "use_cache")
_ABOUT_PROGRAMS = ("pretraining_tp", "return_dict", "torchscript", "transformers_version")
_ABOUT_TRAINING = ("output_router_logits", "router_aux_loss_coef")
_NOT_OF_THE_FUNCTION = frozenset((*_ABOUT_FILES, *_ABOUT_USE, *_ABOUT_PROGRAMS, *_ABOUT_TRAINING))
"""Keys that do not change what the model computes. How it is trained is a matter of the run's own flags."""


@dataclass(frozen=True)
class Family:
    """An architecture of transformers: its tensors, and the rules for its config.json."""

    architecture: str
    """Name of its class, as in the `architectures` of config.json."""
    model_type: str
    tensors: TensorMapping
    rules: tuple[Rule, ...]
    defaults: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    """Values that transformers gives to absent keys, for a `model_type` that `hub_defaults.py` does not have."""
    constants: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    """Patterns of tensors that are constants and not weights. Old releases of transformers stored them."""

    @property
    def has_experts(self) -> bool:
        """Whether some layers have experts."""
        return any("router" in name for name in self.tensors)

    def complete_config(self, config: Json, file: str = "config.json") -> dict[str, Json]:
        """Returns the keys of config.json with the defaults of transformers for those that are absent.

        Raises UserError, naming `file` and key, for values of a wrong type and for a `model_type` of another family.
        """
        model_type = config.get("model_type")
        problems = []
        if model_type not in (None, self.model_type):
            problems.append(
                f"architectures is {self.architecture}, which has model_type {self.model_type!r}, but model_type is "
                f"{model_type!r}; correct the wrong one"
            )
        try:
            config = with_defaults(config, self.model_type, self.defaults)
        except UserError as error:
            problems += str(error).splitlines()
        _raise_all(problems, file)
        return dict(config)

    def fields_of(self, config: Json, ignored: Sequence[str] = (), file: str = "config.json") -> dict[str, Any]:
        """Returns our fields for what config.json says.

        Raises UserError with all problems, each naming `file` and key: values that are unsupported, and keys that are
        unknown here and not `ignored`.
        """
        config = self.complete_config(config, file)
        known = {key for rule in self.rules for key in rule.reads} | _NOT_OF_THE_FUNCTION | set(ignored)
        unknown = sorted(key for key, value in config.items() if key not in known and value is not None)
        problems = [f"{key} is not known for {self.architecture}" for key in unknown]
        fields: dict[str, Any] = {}
        for rule in self.rules:
            try:
                fields |= rule.fields(config)
            except UserError as error:
                problems.append(str(error))
        _raise_all(problems, file)
        return fields

    def config_of(self, values: Values) -> dict[str, Json]:
        """Returns the keys of config.json for all values of a run, as far as the family can express these."""
        keys: dict[str, Json] = {"architectures": [self.architecture], "model_type": self.model_type}
        for rule in self.rules:
            keys |= rule.keys(values)
        return keys

    def is_constant(self, name: str) -> bool:
        """Whether the hub tensor of this name is a constant and not a weight."""
        return any(re.fullmatch(pattern, name) for pattern in self.constants)


def _raise_all(problems: Sequence[str], file: str) -> None:
    if problems:
        raise UserError("\n".join(f"{file}: {problem}" for problem in problems))


FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        _AROUND | _ATTENTION | _QKV_BIAS | _OUTPUT_BIAS | _MLP,
        (*_DECODER, LinearBiases()),
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        _AROUND | _ATTENTION | _MLP,
        (*_DECODER, SlidingWindows()),
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        _AROUND | _ATTENTION | _QKV_BIAS | _MLP,
        (
            *_DECODER,
            Implied({"add_qkv_bias": True}),
            SlidingWindows(by_layer=True),
            Fixed("use_mrope", False, write=False),
        ),
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        _AROUND | _ATTENTION | _HEAD_NORMS | _MLP,
        (*_DECODER, Fixed("attention_bias", False), Implied({"qk_layernorm": True}), SlidingWindows(by_layer=True)),
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        _AROUND | _ATTENTION | _experts("block_sparse_moe", "w1", "w3", "w2"),
        (
            *_DECODER,
            SlidingWindows(),
            Copied("num_local_experts", "num_moe_experts"),
            Fixed("router_jitter_noise", 0.0),
            RouterWeights(key=None),
        ),
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _AROUND | _ATTENTION | _HEAD_NORMS | _MLP | _experts("mlp", "gate_proj", "up_proj", "down_proj"),
        (
            *_DECODER,
            Fixed("attention_bias", False),
            Implied({"qk_layernorm": True}),
            NoWindows(),
            Copied("num_experts", "num_moe_experts", also="num_local_experts"),
            Copied("moe_intermediate_size", "moe_ffn_hidden_size"),
            ExpertLayers(),
            RouterWeights(),
        ),
    ),
)
"""All families. An export takes the first that expresses the model."""


def family_of(architecture: str, families: Sequence[Family] = FAMILIES) -> Family:
    """Returns the family of a class of transformers. Raises UserError with the known classes."""
    for family in families:
        if architecture == family.architecture:
            return family
    known = ", ".join(family.architecture for family in families)
    raise UserError(f"{architecture} is unknown; these are known: {known}")
