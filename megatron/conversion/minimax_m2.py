"""MiniMax-M2: norms of all queries and keys of a token together, and experts chosen by sigmoid scores with a
correction."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.rope import RotaryPositions


@dataclass(frozen=True)
class RotatedChannels(rules.Rule):
    """Number of rotated channels of a head, in files of the hub; `rope_parameters` comes first."""

    reads = ("rotary_dim",)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the rotated part."""
        channels, rope = config.get("rotary_dim"), config.get("rope_parameters") or {}
        if channels is None or "partial_rotary_factor" in rope:
            return {}
        width = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
        return {"rotary_percent": channels / width}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the number of channels."""
        return {"rotary_dim": round(values["rotary_percent"] * values["kv_channels"])}


MINIMAX_M2_FAMILY = Family(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    decoder.AROUND
    | decoder.ATTENTION
    | decoder.HEAD_NORMS
    | decoder.experts("block_sparse_moe", "w1", "w3", "w2")
    | decoder.expert_bias("block_sparse_moe.e_score_correction_bias"),
    (
        *decoder.BODY,
        RotaryPositions(rotated_part=1.0),
        RotatedChannels(),
        rules.Copied("num_experts_per_tok", "moe_router_topk"),
        *rules.copied(intermediate_size="moe_ffn_hidden_size", num_local_experts="num_moe_experts"),
        rules.Fixed("router_jitter_noise", 0.0),
        rules.Implied({"qk_layernorm": True, "qk_norm_scope": "full", "moe_router_norm_topk_prob": True}),
        rules.Implied({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
        rules.Fixed("use_qk_norm", True, write=False),
        rules.Fixed("qk_norm_type", "per_layer", write=False),
        rules.Fixed("scoring_func", "sigmoid", write=False),
        rules.Fixed("use_routing_bias", True, write=False),
        rules.Unused(
            ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "attn_type_list", "mlp_intermediate_size")
        ),
    ),
)
