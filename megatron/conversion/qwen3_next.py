"""Qwen3-Next: gated delta nets between layers of gated attention, experts, and a shared expert with a gate; and the
text models of Qwen3.5, the same with dense MLPs."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS, one_to_one
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.rope import RotaryPositions
from megatron.conversion.spellings import run_of
from megatron.conversion.tensor_mapping import ALL, KEYS, VALUES, HubTensorPattern, TensorMapping
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import layer_parts

_DELTA, _LINEAR = f"{OURS}.self_attention", f"{HUB}.linear_attn"


_LAYERS = decoder.AROUND | decoder.ATTENTION | decoder.OUTPUT_BIAS | decoder.HEAD_NORMS | decoder.MLP
_EXPERTS = decoder.experts("mlp") | decoder.shared_experts("mlp.shared_expert") | decoder.SHARED_EXPERT_GATE


def _queries_with_gates(values: rules.Values) -> decoder.Mapping:
    """Returns the table of the joint projection. Theirs has the rows of each query head before those of its gate; ours
    has the query heads of a group before its gates."""
    heads = values["num_attention_heads"] // values["num_query_groups"]
    queries, gates = (ALL, slice(0, heads)), (ALL, slice(heads, 2 * heads))
    return {
        f"{OURS}.self_attention.linear_qkv.{kind}": (
            HubTensorPattern(f"{HUB}.self_attn.q_proj.{kind}", queries, fused=(gates,), alternate_behind=1),
            HubTensorPattern(f"{HUB}.self_attn.k_proj.{kind}", KEYS),
            HubTensorPattern(f"{HUB}.self_attn.v_proj.{kind}", VALUES),
        )
        for kind in ("weight", "bias")
    }


def _delta_net(values: rules.Values) -> decoder.Mapping:
    """Returns the table of a delta net. Theirs has b and a of all heads in a matrix of their own; their convolution has
    the queries of all heads, then the keys, then the values."""
    keys = values["linear_key_head_dim"]
    shared = values["linear_num_value_heads"] // values["linear_num_key_heads"]
    strengths = 2 * (keys + shared * values["linear_value_head_dim"])  # b and a are behind q, k, v and z
    return one_to_one(
        {f"{_DELTA}.{name}": f"{_LINEAR}.{name}" for name in ("A_log", "dt_bias", "out_proj.weight")}
        | {f"{_DELTA}.out_norm.weight": f"{_LINEAR}.norm.weight"}
    ) | {
        f"{_DELTA}.in_proj.weight": (
            HubTensorPattern(f"{_LINEAR}.in_proj_qkvz.weight", (ALL, slice(0, strengths))),
            HubTensorPattern(f"{_LINEAR}.in_proj_ba.weight", (ALL, slice(strengths, None))),
        ),
        f"{_DELTA}.conv1d.weight": (
            HubTensorPattern(
                f"{_LINEAR}.conv1d.weight",
                (ALL, slice(0, keys)),
                fused=((ALL, slice(keys, 2 * keys)), (ALL, slice(2 * keys, None))),
                axes=((0, 1), (), (2,)),
            ),
        ),
    }


@dataclass(frozen=True)
class LinearAttentionLayers(rules.Rule):
    """Layers that are delta nets: those that `layer_types` names; without it all but every `full_attention_interval`-th
    one."""

    reads = ("layer_types", "full_attention_interval")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the pattern. Raises UserError for unknown types of layers."""
        count, kinds = config["num_hidden_layers"], config["layer_types"]
        period = config.get("full_attention_interval", 4)
        if not isinstance(period, int) or period < 1:
            raise UserError(f"full_attention_interval is {period!r}; it must be at least 1")
        if kinds is None:
            kinds = [_KINDS[layer % period > 0] for layer in range(1, count + 1)]
        kinds = rules.checked_types({**config, "layer_types": kinds}, "layer_types", _KINDS, " and ".join(_KINDS))
        return {"linear_attention_freq": [_KINDS.index(kind) for kind in kinds]}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the type of each layer."""
        config = run_of(values)
        mixers = [layer_parts(config, layer + 1).token_mixer for layer in range(values["num_layers"])]
        return {"layer_types": [_KINDS[mixer == "gated_delta_net"] for mixer in mixers]}


_KINDS = ("full_attention", "linear_attention")

_RULES: tuple[rules.Rule, ...] = (
    *decoder.BODY,
    RotaryPositions(rotated_part=0.25),
    layer_rules.ATTENTION_BIASES,
    LinearAttentionLayers(),
    *(
        rules.Copied(key, key)
        for key in (
            *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
            *("linear_num_key_heads", "linear_num_value_heads"),
        )
    ),
    rules.Implied({"experimental_attention_variant": "gated_delta_net", "attention_output_gate": True}),
    rules.Implied({"qk_layernorm": True, "layernorm_zero_centered_gamma": True}),
)
"""Rules of all models of this form. The experts are not among them."""

_PREDICTION_LAYERS = (r"mtp\..*",)
"""Layers of multi-token prediction, which transformers leaves out too."""

QWEN3_NEXT_FAMILY = Family(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    lambda values: _LAYERS | _EXPERTS | _queries_with_gates(values) | _delta_net(values),
    (
        *_RULES,
        rules.Copied("num_experts", "num_moe_experts", also="num_local_experts"),
        rules.Copied("moe_intermediate_size", "moe_ffn_hidden_size"),
        rules.Copied("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        layer_rules.ExpertLayers(),
        layer_rules.RouterWeights(),
        rules.Fixed("use_sliding_window", False, write=False),
        rules.Implied({"moe_shared_expert_gate": True}),
    ),
    constants=_PREDICTION_LAYERS,
)


def _tensors_of_qwen3_5(values: rules.Values) -> TensorMapping:
    """Returns the table. The projections of a delta net are four tensors, each with all queries before all keys before
    all values."""
    keys = values["linear_key_head_dim"]
    shared = values["linear_num_value_heads"] // values["linear_num_key_heads"]
    ends = [keys, 2 * keys, 2 * keys + shared * values["linear_value_head_dim"]]
    ends += [ends[-1] + shared * values["linear_value_head_dim"]]
    ends += [ends[-1] + shared, ends[-1] + 2 * shared]
    q, k, v, z, b, a = ((ALL, slice(begin, end)) for begin, end in zip([0, *ends], ends, strict=False))
    projections = (
        HubTensorPattern(f"{_LINEAR}.in_proj_qkv.weight", q, fused=(k, v)),
        HubTensorPattern(f"{_LINEAR}.in_proj_z.weight", z),
        HubTensorPattern(f"{_LINEAR}.in_proj_b.weight", b),
        HubTensorPattern(f"{_LINEAR}.in_proj_a.weight", a),
    )
    delta_net = _delta_net(values) | {f"{_DELTA}.in_proj.weight": projections}
    return _LAYERS | _queries_with_gates(values) | delta_net


QWEN3_5_FAMILY = Family(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    _tensors_of_qwen3_5,
    _RULES,
    constants=_PREDICTION_LAYERS,
)
