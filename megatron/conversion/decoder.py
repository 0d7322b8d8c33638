"""Tables that the families of decoders share: the tensors and the settings of decoders like Llama."""

from megatron.conversion.config_rules import Copied, Fixed, Implied, Rule, TiedEmbeddings
from megatron.conversion.family import EMBEDDING, HEAD
from megatron.conversion.layer_rules import AttentionHeads
from megatron.conversion.rope import RotaryPositions
from megatron.conversion.tensor_mapping import GATE, KEYS, QUERIES, UP, VALUES, HubTensorPattern

# ---------------------------------------------------------------------------------------------------------------------
# Tensors

Mapping = dict[str, tuple[HubTensorPattern, ...]]
"""Hub tensors by canonical name."""

OURS, HUB = "decoder.layers.{layer}", "model.layers.{layer}"


def one_to_one(names: dict[str, str]) -> Mapping:
    """Returns the mapping of canonical tensors that are hub tensors with the same rows."""
    return {ours: (HubTensorPattern(hub),) for ours, hub in names.items()}


ENDS: Mapping = one_to_one(
    {
        "embedding.word_embeddings.weight": EMBEDDING,
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": HEAD,
    }
)
"""What is before and after the layers."""
AROUND: Mapping = ENDS | one_to_one(
    {
        f"{OURS}.input_layernorm.weight": f"{HUB}.input_layernorm.weight",
        f"{OURS}.pre_mlp_layernorm.weight": f"{HUB}.post_attention_layernorm.weight",
    }
)
"""What is before and after the layers, and the norms before attention and MLP."""


def _qkv(kind: str) -> tuple[HubTensorPattern, ...]:
    parts = {"q": QUERIES, "k": KEYS, "v": VALUES}
    return tuple(HubTensorPattern(f"{HUB}.self_attn.{name}_proj.{kind}", part) for name, part in parts.items())


ATTENTION: Mapping = {
    f"{OURS}.self_attention.linear_qkv.weight": _qkv("weight"),
    f"{OURS}.self_attention.linear_proj.weight": (HubTensorPattern(f"{HUB}.self_attn.o_proj.weight"),),
}
QKV_BIAS: Mapping = {f"{OURS}.self_attention.linear_qkv.bias": _qkv("bias")}
OUTPUT_BIAS: Mapping = {f"{OURS}.self_attention.linear_proj.bias": (HubTensorPattern(f"{HUB}.self_attn.o_proj.bias"),)}
HEAD_NORMS: Mapping = {
    f"{OURS}.self_attention.q_layernorm.weight": (HubTensorPattern(f"{HUB}.self_attn.q_norm.weight"),),
    f"{OURS}.self_attention.k_layernorm.weight": (HubTensorPattern(f"{HUB}.self_attn.k_norm.weight"),),
}


def gated(ours: str, hub: str, gate: str, up: str, down: str) -> Mapping:
    """Returns the mapping of a gated MLP, with or without biases. The hub's names are those of its three matrices."""
    return {
        f"{ours}.linear_fc1.{kind}": (
            HubTensorPattern(f"{hub}.{gate}.{kind}", GATE),
            HubTensorPattern(f"{hub}.{up}.{kind}", UP),
        )
        for kind in ("weight", "bias")
    } | {f"{ours}.linear_fc2.{kind}": (HubTensorPattern(f"{hub}.{down}.{kind}"),) for kind in ("weight", "bias")}


MLP = gated(f"{OURS}.mlp", f"{HUB}.mlp", "gate_proj", "up_proj", "down_proj")
FUSED_MLP = one_to_one(
    {
        f"{OURS}.mlp.linear_fc1.weight": f"{HUB}.mlp.gate_up_proj.weight",
        f"{OURS}.mlp.linear_fc2.weight": f"{HUB}.mlp.down_proj.weight",
    }
)
"""A gated MLP whose gate and up matrices are one tensor."""


def with_biases(names: dict[str, str]) -> Mapping:
    """Returns the mapping of modules whose weight and bias are hub tensors with the same rows."""
    return one_to_one({f"{ours}.{kind}": f"{hub}.{kind}" for ours, hub in names.items() for kind in ("weight", "bias")})


def ungated(first: str, second: str) -> Mapping:
    """Returns the mapping of an MLP without a gate, with or without biases, by the names of its two matrices."""
    return with_biases(
        {f"{OURS}.mlp.linear_fc1": f"{HUB}.mlp.{first}", f"{OURS}.mlp.linear_fc2": f"{HUB}.mlp.{second}"}
    )


NORM_BIASES: Mapping = one_to_one(
    {
        "decoder.final_layernorm.bias": "model.norm.bias",
        f"{OURS}.input_layernorm.bias": f"{HUB}.input_layernorm.bias",
        f"{OURS}.pre_mlp_layernorm.bias": f"{HUB}.post_attention_layernorm.bias",
    }
)
"""Biases of the norms of AROUND."""
SHARED_EXPERT_GATE: Mapping = {
    f"{OURS}.mlp.shared_experts.gate_weight": (
        HubTensorPattern(f"{HUB}.mlp.shared_expert_gate.weight", axes=((0,), (1,))),
    )
}


def experts(block: str, gate: str, up: str, down: str) -> Mapping:
    """Returns the mapping of a router and of experts, each of which has hub tensors of its own."""
    hub = f"{HUB}.{block}"
    router = {f"{OURS}.mlp.router.weight": (HubTensorPattern(f"{hub}.gate.weight"),)}
    return router | gated(f"{OURS}.mlp.experts", f"{hub}.experts.{{expert}}", gate, up, down)


# ---------------------------------------------------------------------------------------------------------------------
# Settings

SIZES: tuple[Rule, ...] = (
    Copied("num_hidden_layers", "num_layers"),
    Copied("hidden_size", "hidden_size"),
    Copied("max_position_embeddings", "max_position_embeddings"),
    Copied("attention_dropout", "attention_dropout"),
    Copied("initializer_range", "init_method_std"),
    TiedEmbeddings(),
    Implied({"normalization": "RMSNorm", "add_bias_linear": False, "hidden_dropout": 0.0}),
)
"""Rules of decoders with RMSNorm. The epsilon, the MLP, the heads and the positions are not among them."""

SWIGLU: tuple[Rule, ...] = (
    Copied("intermediate_size", "ffn_hidden_size"),
    Fixed("hidden_act", "silu", also=("swish",)),
    Implied({"swiglu": True}),
)
EPSILON = Copied("rms_norm_eps", "layernorm_epsilon")
DECODER: tuple[Rule, ...] = (*SIZES, *SWIGLU, EPSILON, AttentionHeads(), RotaryPositions())
"""Rules of decoders like Llama."""
