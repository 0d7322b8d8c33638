"""Rotary positions in config.json.

transformers 5 has `rope_parameters`; older releases have `rope_theta` and `rope_scaling`. Exports write the older form,
because all releases read it. Imports read both, with the precedence of transformers 5: a `rope_scaling` that is not
empty replaces all of `rope_parameters`; inside it, `rope_theta` comes before the `rope_theta` of config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.conversion.config_rules import Rule, Values
from megatron.conversion.hub_defaults import Json
from megatron.conversion.spellings import rope_scaling_of
from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table

_KINDS: dict[str, dict[str, str]] = {
    "default": {},
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
"""Supported scalings, with their keys beside `factor` and our fields for these. Other keys are refused."""

_OF_ONE_KIND = ("dynamic", "longrope")
"""Further scalings, of families whose layers are all scaled alike."""

_REQUIRED = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "linear": ("factor",), "yarn": ("factor",)}
"""Keys that transformers demands too."""


@dataclass(frozen=True)
class RotaryPositions(Rule):
    """Base of the rotary frequencies, and how they are scaled for a longer context."""

    absent: Mapping[str, Json] | None = None
    """What the family has if config.json has neither `rope_scaling` nor `rope_parameters`."""
    rotated_part: float | None = None
    """Part of each head that is rotated if config.json does not say it; None: the family rotates whole heads."""
    old_part: str = ""
    """Key of the rotated part in older releases, if the family had another than `partial_rotary_factor`."""
    old_base: str = ""
    """Key of the base in older releases, if the family had another than `rope_theta`."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys."""
        keys = ("rope_theta", "rope_scaling", "rope_parameters", *filter(None, (self.old_part, self.old_base)))
        return keys if self.rotated_part is None else (*keys, "partial_rotary_factor")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns base and scaling. Raises UserError for parameters by layer type, and for unsupported scalings."""
        key = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
        rope = self.absent if config[key] is None else config[key]
        rope = dict(rope or {})
        nested = [name for name, value in rope.items() if isinstance(value, dict)]
        if nested:
            raise UserError(f"{key} has parameters for each type of layer ({', '.join(nested)}), which are unsupported")
        base = whole_base(rope.get("rope_theta", config.get(self.old_base, config["rope_theta"])))
        fields: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": base}
        if self.rotated_part is not None:
            part = config.get(self.old_part, config.get("partial_rotary_factor"))
            part = rope.pop("partial_rotary_factor", part)
            fields["rotary_percent"] = self.rotated_part if part is None else float(part)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "longrope":
            return {**fields, **divisor_fields(key, rope, config)}
        if kind == "dynamic":
            return {**fields, **_dynamic_fields(key, rope, config)}
        return {**fields, **scaling_fields(key, rope, config)}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns `rope_theta`, `rope_scaling` and, if the family has it, the rotated part."""
        none = None if self.absent is None else {"rope_type": "default"}
        keys = {"rope_theta": float(values["rotary_base"]), "rope_scaling": scaling_key(values) or none}
        if self.rotated_part is not None:
            keys[self.old_part or "partial_rotary_factor"] = values["rotary_percent"]
        return keys | ({self.old_base: keys["rope_theta"]} if self.old_base else {})


def whole_base(base: Json) -> int:
    """Returns the base of rotary frequencies. Raises UserError unless it is a whole number."""
    if not isinstance(base, int | float) or not float(base).is_integer():
        raise UserError(f"rope_theta is {base!r}; only integers are supported")
    return int(base)


def scaling_key(values: Values) -> dict[str, Json] | None:
    """Returns the value of `rope_scaling`; None without scaling, or for a kind that is not supported."""
    scaling = rope_scaling_of(values)
    if scaling is not None and scaling[0] == "longrope":
        return divisor_key(values) | {"factor": scaling[1]}
    if scaling is not None and scaling[0] == "dynamic":
        return {"rope_type": "dynamic", "factor": scaling[1]}
    if scaling is None or scaling[0] not in _KINDS:
        return None
    kind, factor = scaling
    given = {key: values[field] for key, field in _KINDS[kind].items() if values[field] is not None}
    return {"rope_type": kind, "factor": factor, **given}


def scaling_fields(key: str, rope: Json, config: Json) -> dict[str, object]:
    """Returns the fields of a scaling. `key` is the key of config.json whose value is `rope`."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _KINDS:
        raise UserError(f"{key} has rope_type {kind!r}; {', '.join((*_KINDS, *_OF_ONE_KIND))} are supported")
    known = ("rope_theta", "rope_type", "type", *_KINDS[kind], *_REQUIRED.get(kind, ()))
    unknown = [name for name, value in rope.items() if name not in known and value is not None]
    if unknown:
        raise UserError(f"{key} with rope_type {kind!r} has {', '.join(unknown)}, which is unsupported")
    missing = [name for name in _REQUIRED.get(kind, ()) if rope.get(name) is None]
    if missing:
        raise UserError(f"{key} with rope_type {kind!r} has no {', '.join(missing)}")
    wrong = [name for name in known[3:] if not isinstance(rope.get(name), int | float | None)]
    if wrong:
        raise UserError(f"{key} has {wrong[0]} {rope[wrong[0]]!r}, but it must be a number")
    if kind == "default":
        return {}
    fields: dict[str, Any] = {"rope_scaling_type": kind, "rope_scaling_factor": float(rope["factor"])}
    for name, field in _KINDS[kind].items():
        default = flag_table()[field].default
        absent = config["max_position_embeddings"] if name == "original_max_position_embeddings" else default
        value = absent if rope.get(name) is None else rope[name]
        if value != default:
            fields[field] = type(default if default is not None else 0.0)(value)
    return fields


def _dynamic_fields(key: str, rope: Json, config: Json) -> dict[str, object]:
    """Returns the fields of a base that grows with the row, beyond `max_position_embeddings` tokens."""
    unknown = [
        name for name in rope if name not in ("rope_theta", "rope_type", "type", "factor", "partial_rotary_factor")
    ]
    if unknown:
        raise UserError(f"{key} with rope_type 'dynamic' has {', '.join(unknown)}, which is unsupported")
    factor = rope.get("factor")
    if not isinstance(factor, int | float):
        raise UserError(f"{key} has factor {factor!r}, but it must be a number")
    return {
        "rope_scaling_type": "dynamic",
        "rope_scaling_factor": float(factor),
        "rope_scaling_original_length": config["max_position_embeddings"],
    }


def divisor_fields(key: str, rope: Json, config: Json) -> dict[str, object]:
    """Returns the fields of a divisor for each frequency (`longrope`). The original length beside `rope` comes first.
    Raises UserError for what it does not have."""
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings"}
    known |= {"short_factor", "long_factor", "factor", "attention_factor"}
    unknown = [name for name, value in rope.items() if name not in known and value is not None]
    if unknown:
        raise UserError(f"{key} with rope_type 'longrope' has {', '.join(unknown)}, which is unsupported")
    lists = {name: rope.get(f"{name}_factor") for name in ("short", "long")}
    for name, numbers in lists.items():
        if not isinstance(numbers, list) or not all(isinstance(number, int | float) for number in numbers):
            raise UserError(f"{key} has {name}_factor {numbers!r}, but it must be a list of numbers")
    length, name = config["max_position_embeddings"], "original_max_position_embeddings"
    original = config.get(name) or rope.get(name) or length
    factor, own = rope.get("factor"), rope.get("attention_factor")
    return {
        "rope_scaling_type": "longrope",
        "rope_scaling_factor": length / original if factor is None else float(factor),
        "rope_scaling_original_length": original,
        **{f"rope_scaling_{name}_factor": [float(number) for number in lists[name]] for name in lists},
        **({} if own is None else {"rope_scaling_attention_factor": float(own)}),
    }


def divisor_key(values: Values) -> dict[str, Json]:
    """Returns the value of `rope_scaling` with a divisor for each frequency, without the factor."""
    own = values["rope_scaling_attention_factor"]
    return {
        "rope_type": "longrope",
        **{f"{name}_factor": values[f"rope_scaling_{name}_factor"] for name in ("short", "long")},
        "original_max_position_embeddings": values["rope_scaling_original_length"],
        **({} if own is None else {"attention_factor": own}),
    }
