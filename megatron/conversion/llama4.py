"""The text models of Llama 4: chunked attention, layers without positions whose queries are scaled, and experts whose
inputs are weighted."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.rope import RotaryPositions
from megatron.conversion.smollm3 import LayersWithoutPositions
from megatron.conversion.spellings import run_of
from megatron.conversion.tensor_mapping import HubTensorPattern
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import has_experts, is_chunked

_CHUNKED, _FULL = "chunked_attention", "full_attention"
_POSITIONS = LayersWithoutPositions()


@dataclass(frozen=True)
class Chunks(rules.Rule):
    """Layers that attend to chunks: those that `layer_types` names, without it those with positions."""

    reads = ("attention_chunk_size", "layer_types")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns size and layers of chunks; nothing if no layer has them."""
        size, kinds = (config[key] for key in self.reads)
        count = config["num_hidden_layers"]
        if kinds is None:
            without = _POSITIONS.fields(config).get("no_rope_freq", [0] * count)
            kinds = [_FULL if layer or size is None else _CHUNKED for layer in without]
        given = {**config, "layer_types": kinds}
        kinds = rules.checked_types(given, "layer_types", (_CHUNKED, _FULL), f"{_CHUNKED} and {_FULL}")
        pattern = [int(kind == _CHUNKED) for kind in kinds]
        if not any(pattern):
            return {}
        if size is None or size < 1:
            raise UserError(f"attention_chunk_size is {size}; with layers of {_CHUNKED} it must be at least 1")
        return {"attention_chunk_size": size, "attention_chunk_skip_freq": None if all(pattern) else pattern}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns both keys."""
        config = run_of(values)
        kinds = [_CHUNKED if is_chunked(config, layer) else _FULL for layer in range(1, values["num_layers"] + 1)]
        return {"attention_chunk_size": values["attention_chunk_size"], "layer_types": kinds}


@dataclass(frozen=True)
class ScaledQueries(rules.Rule):
    """Queries of layers without positions, which grow with the logarithm of the position."""

    reads = ("attn_temperature_tuning", "attn_scale", "floor_scale")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns both numbers; nothing if it is switched off, or if all layers have positions."""
        is_on, scale, floor = (config[key] for key in self.reads)
        if not is_on or not _POSITIONS.fields(config):
            return {}
        return {"nope_temperature_scale": scale, "nope_temperature_floor": floor}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns all keys."""
        scale = values["nope_temperature_scale"]
        numbers = {} if scale is None else {"attn_scale": scale, "floor_scale": values["nope_temperature_floor"]}
        return {"attn_temperature_tuning": scale is not None, **numbers}


@dataclass(frozen=True)
class NormedHeads(rules.Rule):
    """Norms of queries and keys behind their rotation, without weights, with the epsilon of the other norms."""

    reads = ("use_qk_norm",)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns switch and epsilon."""
        return {"qk_l2_norm": True, "qk_l2_norm_epsilon": config["rms_norm_eps"]} if config["use_qk_norm"] else {}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the switch."""
        return {"use_qk_norm": values["qk_l2_norm"]}


@dataclass(frozen=True)
class OneExpert(rules.Rule):
    """The expert of a token, and the layers that have experts: every `interleave_moe_layer_step`-th, or
    `moe_layers` (counted from 0)."""

    reads = ("num_experts_per_tok", "interleave_moe_layer_step", "moe_layers")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns router and layers. Raises UserError for several experts of a token."""
        chosen, step, layers = (config[key] for key in self.reads)
        if chosen != 1:
            raise UserError(
                f"num_experts_per_tok is {chosen}; only 1 is supported, because the inputs of experts are weighted "
                "(--moe-apply-probs-on-input)"
            )
        if step < 1:
            raise UserError(f"interleave_moe_layer_step is {step}; it must be at least 1")
        count = config["num_hidden_layers"]
        layers = range(step - 1, count, step) if layers is None else layers
        pattern = [int(layer in layers) for layer in range(count)]
        return {
            "moe_router_topk": 1,
            "moe_router_score_function": "sigmoid",
            "moe_apply_probs_on_input": True,
            "moe_layer_freq": rules.layers_of(pattern),
        }

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the number of experts of a token and the layers."""
        config = run_of(values)
        layers = [layer for layer in range(values["num_layers"]) if has_experts(config, layer + 1)]
        return {"num_experts_per_tok": values["moe_router_topk"], "moe_layers": layers}


_EXPERTS = f"{HUB}.feed_forward.experts"

LLAMA4_FAMILY = Family(
    "Llama4ForCausalLM",
    "llama4_text",
    decoder.AROUND
    | decoder.BIASED_ATTENTION
    | decoder.gated(f"{OURS}.mlp", f"{HUB}.feed_forward")
    | decoder.shared_experts("feed_forward.shared_expert")
    | {  # ours: [experts, gate and up, ffn_hidden_size, hidden_size] and [experts, hidden_size, ffn_hidden_size]
        f"{OURS}.mlp.router.weight": (HubTensorPattern(f"{HUB}.feed_forward.router.weight"),),
        f"{OURS}.mlp.experts.linear_fc1.weight": (
            HubTensorPattern(f"{_EXPERTS}.gate_up_proj", axes=((0,), (3,), (1, 2))),
        ),
        f"{OURS}.mlp.experts.linear_fc2.weight": (HubTensorPattern(f"{_EXPERTS}.down_proj", axes=((0,), (2,), (1,))),),
    },
    (
        *decoder.SIZES,
        decoder.EPSILON,
        layer_rules.AttentionHeads(),
        layer_rules.ATTENTION_BIASES,
        RotaryPositions(),
        _POSITIONS,
        ScaledQueries(),
        Chunks(),
        NormedHeads(),
        OneExpert(),
        rules.Copied("intermediate_size_mlp", "ffn_hidden_size"),
        rules.Copied("intermediate_size", "moe_ffn_hidden_size"),
        rules.Copied("intermediate_size", "moe_shared_expert_intermediate_size"),
        rules.Copied("num_local_experts", "num_moe_experts"),
        rules.Fixed("hidden_act", "silu"),
        rules.Implied({"swiglu": True, "rotary_interleaved": True}),
        rules.Unused(("router_jitter_noise", "for_llm_compressor")),
    ),
    constants=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq"),
)
