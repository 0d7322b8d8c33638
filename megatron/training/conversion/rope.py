"""Rotary positions in config.json: `rope_parameters` of today's releases of transformers, and `rope_theta` beside
`rope_scaling` of those before 5, which is what is written, because all of them read it."""

from dataclasses import dataclass
from typing import Any

from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table
from megatron.training.conversion.settings import Json, Values, value_of

_KINDS: dict[str, dict[str, str]] = {
    "linear": {},
    "llama3": {
        "original_max_position_embeddings": "rope_scaling_original_length",
        "low_freq_factor": "rope_scaling_low_freq_factor",
        "high_freq_factor": "rope_scaling_high_freq_factor",
    },
    "yarn": {
        "original_max_position_embeddings": "rope_scaling_original_length",
        "beta_fast": "rope_scaling_beta_fast",
        "beta_slow": "rope_scaling_beta_slow",
        "truncate": "rope_scaling_truncate",
        "attention_factor": "rope_scaling_attention_factor",
    },
}
"""The scalings that can be had: their keys beside `factor`, and our fields. Other keys are refused."""


@dataclass(frozen=True)
class Rope:
    """Base of the frequencies and how they are stretched to a longer context."""

    base: float = 10000.0
    """Where config.json does not say."""

    reads = ("rope_theta", "rope_scaling", "rope_parameters")

    def fields(self, config: Json) -> dict[str, Any]:
        rope = value_of(config, "rope_parameters", None) or value_of(config, "rope_scaling", {})
        base = value_of(rope, "rope_theta", value_of(config, "rope_theta", self.base))
        if base != int(base):
            raise UserError(f"config.json: rope_theta {base} cannot be had here; {round(base)} can")
        return {"position_embedding_type": "rope", "rotary_base": int(base), **_scaling(rope, config)}

    def keys(self, values: Values) -> dict[str, Json]:
        kind, factor = values["rope_scaling_type"], values["rope_scaling_factor"]
        if values["use_rope_scaling"]:
            kind = "llama3"
        if kind is None and values["rotary_seq_len_interpolation_factor"] is not None:
            kind, factor = "linear", values["rotary_seq_len_interpolation_factor"]
        scaling = None
        if kind in _KINDS:
            given = {key: values[field] for key, field in _KINDS[kind].items() if values[field] is not None}
            scaling = {"rope_type": kind, "factor": float(factor), **given}
        return {"rope_theta": float(values["rotary_base"]), "rope_scaling": scaling}


def _scaling(rope: Json, config: Json) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    if kind not in _KINDS:
        raise UserError(f"config.json: rope scaling {kind} cannot be had here; default, {', '.join(_KINDS)} can")
    rest = {
        key: value
        for key, value in rope.items()
        if key not in ("rope_theta", "rope_type", "type", "factor", *_KINDS[kind]) and value is not None
    }
    if rest:
        raise UserError(f"config.json: {', '.join(rest)} of rope scaling {kind} cannot be had here")
    fields: dict[str, Any] = {"rope_scaling_type": kind, "rope_scaling_factor": float(value_of(rope, "factor"))}
    for key, field in _KINDS[kind].items():
        default = flag_table()[field].default
        if key == "original_max_position_embeddings":
            default = value_of(config, "max_position_embeddings")
        value = value_of(rope, key, default)
        if value != flag_table()[field].default:
            fields[field] = type(flag_table()[field].default or 0.0)(value)
    return fields


def as_scaled_in(values: Values, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with a run's spelling of a scaling: --use-rope-scaling is --rope-scaling-type llama3, and
    --rotary-seq-len-interpolation-factor is linear."""
    kind = fields.get("rope_scaling_type")
    rest = {name: value for name, value in fields.items() if name != "rope_scaling_type"}
    if kind == "llama3" and values["use_rope_scaling"]:
        both = {} if values["rope_scaling_type"] is None else {"rope_scaling_type": kind}
        return rest | both | {"use_rope_scaling": True}
    if kind == "linear" and values["rotary_seq_len_interpolation_factor"] is not None:
        return rest | {"rotary_seq_len_interpolation_factor": int(rest.pop("rope_scaling_factor"))}
    return fields
