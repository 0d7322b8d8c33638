"""ERNIE 4.5: a decoder like Llama that rotates pairs of neighbouring channels; and the same with experts, which softmax
scores with a correction choose, beside shared experts."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.spellings import run_of
from megatron.conversion.tensor_mapping import HubTensorPattern
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import has_experts

ERNIE_FAMILY = Family(
    "Ernie4_5ForCausalLM",
    "ernie4_5",
    decoder.LLAMA,
    (
        *(rule for rule in decoder.DECODER if rule.reads != ("attention_dropout",)),
        layer_rules.Biases("use_bias"),
        rules.Implied({"rotary_interleaved": True, "attention_dropout": 0.0}),
    ),
)


_BESIDE_EXPERTS = ("add_qkv_bias", "attention_output_bias", "mlp_bias", "output_layer_bias")
"""All linear layers but routers and experts."""


@dataclass(frozen=True)
class LayersOfExperts(rules.Rule):
    """Every `moe_layer_interval`-th layer has experts, from one layer to another (counted from 0; -1: the last one)."""

    reads = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the pattern of layers."""
        first, last, interval, count = (config[key] for key in (*self.reads, "num_hidden_layers"))
        if interval < 1:
            raise UserError(f"moe_layer_interval is {interval}; it must be at least 1")
        last = count - 1 if last == -1 else last
        pattern = [int((layer + 1) % interval == 0 and first <= layer <= last) for layer in range(count)]
        return {"moe_layer_freq": rules.layers_of(pattern)}

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

    def fields(self, config: Json) -> dict[str, object]:
        """Returns both widths."""
        width, shared = (config[key] for key in self.reads)
        return {"moe_ffn_hidden_size": width, "moe_shared_expert_intermediate_size": shared * width or None}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns both keys."""
        width = values["moe_ffn_hidden_size"] or values["ffn_hidden_size"]
        return dict(
            zip(self.reads, (width, (values["moe_shared_expert_intermediate_size"] or 0) // width), strict=True)
        )


ERNIE_MOE_FAMILY = Family(
    "Ernie4_5_MoeForCausalLM",
    "ernie4_5_moe",
    decoder.LLAMA
    | decoder.experts("mlp")
    | decoder.shared_experts("mlp.shared_experts")
    | {
        "output_layer.bias": (HubTensorPattern("lm_head.bias"),),
        f"{OURS}.mlp.router.expert_bias": (
            HubTensorPattern(f"{HUB}.mlp.moe_statics.e_score_correction_bias", axes=((), (0,))),
        ),
    },
    (
        *(rule for rule in ERNIE_FAMILY.rules if rule.reads != ("use_bias",)),
        layer_rules.Biases("use_bias", _BESIDE_EXPERTS),
        LayersOfExperts(),
        SharedExperts(),
        *rules.copied(moe_num_experts="num_moe_experts", moe_k="moe_router_topk"),
        rules.Implied({"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}),
        rules.Implied({"moe_router_norm_topk_prob": True, "moe_router_enable_expert_bias": True}),
        rules.Unused(("moe_norm_min", "moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers")),
    ),
    constants=(r"model\.mtp_.*",),
)
