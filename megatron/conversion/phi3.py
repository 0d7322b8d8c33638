"""Phi-3, whose files have queries, keys and values in one tensor, and positions with a divisor per frequency."""

from dataclasses import dataclass
from typing import Any

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS, one_to_one
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.rope import divisor_fields, whole_base
from megatron.conversion.spellings import rope_scaling_of
from megatron.conversion.tensor_mapping import KEYS, QUERIES, VALUES, HubTensorPattern
from megatron.core.exceptions import UserError


@dataclass(frozen=True)
class LongRope(rules.Rule):
    """Rotary positions of Phi-3: of a part of each head, and with a divisor for each frequency (`longrope`)."""

    reads = (
        *("rope_theta", "rope_scaling", "rope_parameters"),
        *("partial_rotary_factor", "original_max_position_embeddings"),
    )

    def fields(self, config: Json) -> dict[str, Any]:
        """Returns base, rotated part and divisors. Raises UserError for other scalings."""
        key = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
        rope = config[key] or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        kind = "longrope" if kind in ("su", "yarn") else kind  # as older releases called it
        if kind not in ("default", "longrope"):
            raise UserError(f"{key} has rope_type {kind!r}; default, longrope are supported")
        known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
        known |= {"original_max_position_embeddings"}  # the key outside comes first
        unknown = [name for name, value in rope.items() if name not in known and value is not None]
        if unknown and kind == "default":
            raise UserError(f"{key} with rope_type {kind!r} has {', '.join(unknown)}, which is unsupported")
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        fields: dict[str, Any] = {
            "position_embedding_type": "rope",
            "rotary_base": whole_base(rope.get("rope_theta", config["rope_theta"])),
            "rotary_percent": 1.0 if part is None else float(part),
        }
        return fields if kind == "default" else fields | divisor_fields(key, rope, config)

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns all keys. Older releases refuse other keys than the type and the two lists, so others are written
        only where they say something."""
        keys: dict[str, Json] = {"rope_theta": float(values["rotary_base"]), "rope_scaling": None}
        keys["partial_rotary_factor"] = values["rotary_percent"]
        scaling = rope_scaling_of(values)
        if scaling is None or scaling[0] != "longrope":
            return keys
        original = values["rope_scaling_original_length"]
        more = {} if scaling[1] == values["max_position_embeddings"] / original else {"factor": scaling[1]}
        if values["rope_scaling_attention_factor"] is not None:
            more["attention_factor"] = values["rope_scaling_attention_factor"]
        lists = {f"{name}_factor": values[f"rope_scaling_{name}_factor"] for name in ("short", "long")}
        return keys | {
            "rope_scaling": {"type": "longrope", **lists, **more},
            "original_max_position_embeddings": original,
        }


PHI3_FAMILY = Family(
    "Phi3ForCausalLM",
    "phi3",
    decoder.AROUND
    | decoder.FUSED_MLP
    | one_to_one(
        {
            f"{OURS}.self_attention.linear_proj.weight": f"{HUB}.self_attn.o_proj.weight",
        }
    )
    | {
        f"{OURS}.self_attention.linear_qkv.weight": (
            HubTensorPattern(f"{HUB}.self_attn.qkv_proj.weight", QUERIES, fused=(KEYS, VALUES)),
        )
    },
    (
        *decoder.SIZES,
        *decoder.SWIGLU,
        decoder.EPSILON,
        layer_rules.AttentionHeads(),
        layer_rules.SlidingWindows(),
        LongRope(),
        rules.Fixed("resid_pdrop", 0.0),
        rules.Fixed("embd_pdrop", 0.0),
        rules.Fixed("attention_bias", False, write=False),
    ),
)
