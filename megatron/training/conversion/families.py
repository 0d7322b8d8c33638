"""The architectures of transformers that can be converted, as data."""

from collections.abc import Sequence

from megatron.core.exceptions import UserError
from megatron.training.conversion.bert import BERT_FAMILIES
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
)
from megatron.training.conversion.family import EMBEDDING, HEAD, Family
from megatron.training.conversion.rope import RotaryPositions
from megatron.training.conversion.t5 import T5_FAMILIES
from megatron.training.conversion.tensor_mapping import (
    GATE,
    KEYS,
    QUERIES,
    UP,
    VALUES,
    HubTensorPattern,
)

# ---------------------------------------------------------------------------------------------------------------------
# Tensors

_Mapping = dict[str, tuple[HubTensorPattern, ...]]

_OURS, _HUB = "decoder.layers.{layer}", "model.layers.{layer}"

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
    *BERT_FAMILIES,
    *T5_FAMILIES,
)
"""All families. An export takes the first that expresses the model."""


def family_of(architecture: str, families: Sequence[Family] = FAMILIES) -> Family:
    """Returns the family of a class of transformers. Raises UserError with the known classes."""
    for family in families:
        if architecture == family.architecture:
            return family
    known = ", ".join(family.architecture for family in families)
    raise UserError(f"{architecture} is unknown; these are known: {known}")
