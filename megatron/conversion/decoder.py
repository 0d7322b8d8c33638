"""Tables that the families of decoders share: the tensors and the settings of decoders like Llama."""

from megatron.conversion.config_rules import Copied, Fixed, Implied, Rule, TiedEmbeddings, copied
from megatron.conversion.family import EMBEDDING, HEAD
from megatron.conversion.layer_rules import AttentionHeads
from megatron.conversion.rope import RotaryPositions
from megatron.conversion.tensor_mapping import GATE, KEYS, QUERIES, UP, VALUES, HubTensorPattern

# ---------------------------------------------------------------------------------------------------------------------
# Tensors

Mapping = dict[str, tuple[HubTensorPattern, ...]]
"""Hub tensors by canonical name."""

OURS, HUB = "decoder.layers.{layer}", "model.layers.{layer}"
QKV = f"{OURS}.self_attention.linear_qkv"


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


def weights(names: dict[str, str]) -> Mapping:
    """Returns the mapping of modules of a layer whose weights have the same rows, by their names in the layer."""
    return one_to_one({f"{OURS}.{ours}.weight": f"{HUB}.{hub}.weight" for ours, hub in names.items()})


def qkv(hub: str, kind: str, names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")) -> Mapping:
    """Returns the mapping of the joint projection whose queries, keys and values are three tensors below `hub`."""
    parts = zip(names, (QUERIES, KEYS, VALUES), strict=True)
    return {f"{QKV}.{kind}": tuple(HubTensorPattern(f"{hub}.{name}.{kind}", part) for name, part in parts)}


def joint_qkv(hub: str, *kinds: str) -> Mapping:
    """Returns the mapping of the joint projection whose tensor has all queries, then all keys, then all values."""
    return {f"{QKV}.{kind}": (HubTensorPattern(f"{hub}.{kind}", QUERIES, fused=(KEYS, VALUES)),) for kind in kinds}


AROUND = ENDS | weights({"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"})
"""What is before and after the layers, and the norms before attention and MLP."""
QKV_WEIGHT, QKV_BIAS = (qkv(f"{HUB}.self_attn", kind) for kind in ("weight", "bias"))
ATTENTION: Mapping = QKV_WEIGHT | weights({"self_attention.linear_proj": "self_attn.o_proj"})
OUTPUT_BIAS: Mapping = one_to_one({f"{OURS}.self_attention.linear_proj.bias": f"{HUB}.self_attn.o_proj.bias"})
BIASED_ATTENTION = ATTENTION | QKV_BIAS | OUTPUT_BIAS
HEAD_NORMS = weights(
    {"self_attention.q_layernorm": "self_attn.q_norm", "self_attention.k_layernorm": "self_attn.k_norm"}
)


def gated(ours: str, hub: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Mapping:
    """Returns the mapping of a gated MLP, with or without biases. The hub's names are those of its three matrices."""
    return {
        f"{ours}.linear_fc1.{kind}": (
            HubTensorPattern(f"{hub}.{gate}.{kind}", GATE),
            HubTensorPattern(f"{hub}.{up}.{kind}", UP),
        )
        for kind in ("weight", "bias")
    } | {f"{ours}.linear_fc2.{kind}": (HubTensorPattern(f"{hub}.{down}.{kind}"),) for kind in ("weight", "bias")}


MLP = gated(f"{OURS}.mlp", f"{HUB}.mlp")
LLAMA = AROUND | BIASED_ATTENTION | MLP
"""A decoder like Llama, with or without biases."""
FUSED_MLP = weights({"mlp.linear_fc1": "mlp.gate_up_proj", "mlp.linear_fc2": "mlp.down_proj"})
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


def experts(block: str, *names: str) -> Mapping:
    """Returns the mapping of a router and of experts, each of which has hub tensors of its own, named as in `gated`."""
    router = weights({"mlp.router": f"{block}.gate"})
    return router | gated(f"{OURS}.mlp.experts", f"{HUB}.{block}.experts.{{expert}}", *names)


def shared_experts(hub: str) -> Mapping:
    """Returns the mapping of shared experts, by their name in a layer."""
    return gated(f"{OURS}.mlp.shared_experts", f"{HUB}.{hub}")


def expert_bias(hub: str) -> Mapping:
    """Returns the mapping of the biases that correct the scores of experts, by their name in a layer."""
    return one_to_one({f"{OURS}.mlp.router.expert_bias": f"{HUB}.{hub}"})


# ---------------------------------------------------------------------------------------------------------------------
# Settings

CORE: tuple[Rule, ...] = (
    *copied(
        "hidden_size", "max_position_embeddings", num_hidden_layers="num_layers", initializer_range="init_method_std"
    ),
    TiedEmbeddings(),
)
"""Rules of nearly all families."""

SIZES: tuple[Rule, ...] = (
    *CORE,
    Copied("attention_dropout", "attention_dropout"),
    Implied({"normalization": "RMSNorm", "add_bias_linear": False, "hidden_dropout": 0.0}),
)
"""Rules of decoders with RMSNorm. The epsilon, the MLP, the heads and the positions are not among them."""

SWIGLU: tuple[Rule, ...] = (
    Copied("intermediate_size", "ffn_hidden_size"),
    Fixed("hidden_act", "silu", also=("swish",)),
    Implied({"swiglu": True}),
)
EPSILON = Copied("rms_norm_eps", "layernorm_epsilon")
BODY: tuple[Rule, ...] = (*SIZES, *SWIGLU, EPSILON, AttentionHeads())
"""Rules of decoders like Llama, without the positions."""
DECODER: tuple[Rule, ...] = (*BODY, RotaryPositions())
"""Rules of decoders like Llama."""
