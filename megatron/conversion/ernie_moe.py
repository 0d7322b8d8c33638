"""ERNIE 4.5 with experts, which softmax scores with a correction choose, beside shared experts."""

from dataclasses import dataclass
from typing import Any

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder
from megatron.conversion.decoder import HUB, OURS, experts, gated
from megatron.conversion.ernie import ERNIE_FAMILY
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.spellings import bias_places, run_of
from megatron.conversion.tensor_mapping import HubTensorPattern
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import has_experts


@dataclass(frozen=True)
class BiasesBesideExperts(rules.Rule):
    """Biases of all linear layers, the output layer too, but router and experts."""

    reads = ("use_bias",)

    def fields(self, config: Json) -> dict[str, Any]:
        """Returns the switches."""
        fields = ("add_qkv_bias", "attention_output_bias", "mlp_bias", "output_layer_bias")
        return {"add_bias_linear": False, **(dict.fromkeys(fields, True) if config["use_bias"] else {})}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the key."""
        return {"use_bias": bias_places(values)["add_qkv_bias"]}


@dataclass(frozen=True)
class LayersOfExperts(rules.Rule):
    """Every `moe_layer_interval`-th layer has experts, from one layer to another (counted from 0; -1: the last one)."""

    reads = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")

    def fields(self, config: Json) -> dict[str, Any]:
        """Returns the pattern of layers."""
        first, last, interval, count = (config[key] for key in (*self.reads, "num_hidden_layers"))
        if interval < 1:
            raise UserError(f"moe_layer_interval is {interval}; it must be at least 1")
        last = count - 1 if last == -1 else last
        pattern = [int((layer + 1) % interval == 0 and first <= layer <= last) for layer in range(count)]
        return {"moe_layer_freq": 1 if all(pattern) else pattern}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the three numbers; layers in an irregular order are left out."""
        config = run_of(values)
        layers = [layer for layer in range(values["num_layers"]) if has_experts(config, layer + 1)]
        interval = layers[1] - layers[0] if len(layers) > 1 else 1
        return dict(zip(self.reads, (layers[0], layers[-1], interval) if layers else (0, 0, 1), strict=True))


@dataclass(frozen=True)
class SharedExperts(rules.Rule):
    """Width of an expert, and number of shared experts of that width; 0: none."""

    reads = ("moe_intermediate_size", "moe_num_shared_experts")

    def fields(self, config: Json) -> dict[str, Any]:
        """Returns both widths."""
        width, shared = (config[key] for key in self.reads)
        return {"moe_ffn_hidden_size": width, "moe_shared_expert_intermediate_size": shared * width or None}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns both keys."""
        width = values["moe_ffn_hidden_size"] or values["ffn_hidden_size"]
        return dict(
            zip(self.reads, (width, (values["moe_shared_expert_intermediate_size"] or 0) // width), strict=True)
        )


_MLP = ("gate_proj", "up_proj", "down_proj")

ERNIE_MOE_FAMILY = Family(
    "Ernie4_5_MoeForCausalLM",
    "ernie4_5_moe",
    decoder.AROUND
    | decoder.ATTENTION
    | decoder.QKV_BIAS
    | decoder.OUTPUT_BIAS
    | decoder.MLP
    | experts("mlp", *_MLP)
    | gated(f"{OURS}.mlp.shared_experts", f"{HUB}.mlp.shared_experts", *_MLP)
    | {
        "output_layer.bias": (HubTensorPattern("lm_head.bias"),),
        f"{OURS}.mlp.router.expert_bias": (
            HubTensorPattern(f"{HUB}.mlp.moe_statics.e_score_correction_bias", axes=((), (0,))),
        ),
    },
    (
        *(rule for rule in ERNIE_FAMILY.rules if rule.reads != ("use_bias",)),
        BiasesBesideExperts(),
        LayersOfExperts(),
        SharedExperts(),
        rules.Copied("moe_num_experts", "num_moe_experts"),
        rules.Copied("moe_k", "moe_router_topk"),
        rules.Implied({"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}),
        rules.Implied({"moe_router_norm_topk_prob": True, "moe_router_enable_expert_bias": True}),
        rules.Unused(("moe_norm_min", "moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers")),
    ),
    defaults={key: value for key, value in ERNIE_FAMILY.defaults.items() if key != "head_dim"}
    | {
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    constants=(r"model\.mtp_.*",),
)
