"""Phi-3, whose files have queries, keys and values in one tensor, and positions with a divisor per frequency."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.rope import RotaryPositions
from megatron.conversion.spellings import rope_scaling_of
from megatron.core.exceptions import UserError

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class LongRope(RotaryPositions):
    """Rotary positions of Phi-3: with a divisor for each frequency (`longrope`), or as they are."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys."""
        return (*super().reads, _ORIGINAL)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns base, rotated part and divisors. Raises UserError for other scalings."""
        key = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
        rope = dict(config[key] or {})
        kind = rope.get("rope_type", rope.get("type", "default"))
        kind = "longrope" if kind in ("su", "yarn") else kind  # as older releases called it
        if kind not in ("default", "longrope"):
            raise UserError(f"{key} has rope_type {kind!r}; default, longrope are supported")
        if kind == "default":
            rope.pop(_ORIGINAL, None)
        return super().fields({**config, key: rope | {"rope_type": kind}})

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
            _ORIGINAL: original,
        }


PHI3_FAMILY = Family(
    "Phi3ForCausalLM",
    "phi3",
    decoder.AROUND
    | decoder.FUSED_MLP
    | decoder.weights({"self_attention.linear_proj": "self_attn.o_proj"})
    | decoder.joint_qkv(f"{HUB}.self_attn.qkv_proj", "weight"),
    (
        *decoder.BODY,
        layer_rules.SlidingWindows(),
        LongRope(rotated_part=1.0),
        *rules.fixed(resid_pdrop=0.0, embd_pdrop=0.0),
        rules.Fixed("attention_bias", False, write=False),
    ),
)
