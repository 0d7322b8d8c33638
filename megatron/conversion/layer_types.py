"""Settings that differ between layers with a sliding window and layers with full attention (`layer_types`)."""

from dataclasses import dataclass
from typing import Any

from megatron.conversion.config_rules import Rule, Values, checked_types
from megatron.conversion.hub_defaults import Json
from megatron.conversion.rope import scaling_fields, scaling_key, whole_base
from megatron.conversion.spellings import rope_scaling_of, run_of
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import is_windowed

WINDOWED, FULL = "sliding_attention", "full_attention"


def kinds_of_layers(values: Values) -> list[str]:
    """Returns the entries of `layer_types` for a run."""
    config = run_of(values)
    return [WINDOWED if is_windowed(config, layer) else FULL for layer in range(1, values["num_layers"] + 1)]


@dataclass(frozen=True)
class WindowsByLayerType(Rule):
    """Sliding windows in the layers that `layer_types` names; without it in all but every `period`-th layer, or with
    `period` 0 in all if there is a window.

    A window of W tokens includes the token itself, so it is our `window_size` (W - 1, 0).
    """

    period: int
    period_key: str = ""
    """Key with another period, of a family that has one."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys."""
        keys = ("sliding_window", "layer_types")
        return (*keys, self.period_key) if self.period_key else keys

    def fields(self, config: Json) -> dict[str, Any]:
        """Returns window size and layers; nothing if no layer has a window."""
        pattern = [int(kind == WINDOWED) for kind in self._kinds(config)]
        width = config["sliding_window"]
        if not any(pattern):
            return {}
        if width is None or width < 1:
            raise UserError(f"sliding_window is {width}; with layers of {WINDOWED} it must be at least 1")
        return {"window_size": (width - 1, 0), "window_attn_skip_freq": None if all(pattern) else pattern}

    def _kinds(self, config: Json) -> list[str]:
        count = config["num_hidden_layers"]
        if config["layer_types"] is None:
            given = config.get(self.period_key)
            period = self.period if given is None else given
            if period == 0:
                return [FULL if config["sliding_window"] is None else WINDOWED] * count
            return [WINDOWED if layer % period else FULL for layer in range(1, count + 1)]
        return checked_types(config, "layer_types", (WINDOWED, FULL), f"{WINDOWED} and {FULL}")

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns the window and the kind of each layer. A window of another form than (W - 1, 0) is left out.

        A model without windows gets one that no layer uses: transformers makes the mask of all kinds of layers, and
        refuses a null."""
        count, window = values["num_layers"], values["window_size"]
        if window is None or window[1] != 0 or window[0] < 0:
            return {"sliding_window": values["max_position_embeddings"], "layer_types": [FULL] * count}
        return {"sliding_window": window[0] + 1, "layer_types": kinds_of_layers(values)}


@dataclass(frozen=True)
class RotaryPositionsByLayerType(Rule):
    """Rotary positions with one base in layers with a window, which are never scaled, and another in the others.

    transformers 5 has `rope_parameters` for each type of layer. Older releases have `rope_theta`, `rope_scaling` and,
    for the layers with a window, `local_key`.
    """

    base: float
    """Base of layers with full attention if config.json has none."""
    local_base: float
    """Base of layers with a window if config.json has none."""
    local_key: str = ""
    """Key of the base of layers with a window; empty: the family has no such key."""
    base_key: str = "rope_theta"
    """Key of the base of layers with full attention."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys."""
        keys = (self.base_key, "rope_scaling", "rope_parameters")
        return (*keys, self.local_key) if self.local_key else keys

    def fields(self, config: Json) -> dict[str, object]:
        """Returns both bases, and the scaling of layers with full attention."""
        given = config["rope_parameters"] or {}
        others = sorted(given.keys() - {FULL, WINDOWED})
        if others:
            raise UserError(f"rope_parameters has {', '.join(others)}; only {FULL} and {WINDOWED} are supported")
        full, local = dict(given.get(FULL) or {}), dict(given.get(WINDOWED) or {})
        full |= config["rope_scaling"] or {}
        key = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
        if "rope_theta" not in local and config.get("rope_theta") not in (None, self.base) and not self.local_key:
            raise UserError(
                f"rope_theta is {config['rope_theta']}; only {self.base} is supported beside rope_parameters without "
                f"{WINDOWED}, because releases of transformers differ in the layers that have it"
            )
        base = full.get("rope_theta", config.get(self.base_key))
        local_base = local.get("rope_theta", config.get(self.local_key))
        if scaling_fields("rope_parameters", local, config):
            raise UserError(f"rope_parameters has {local['rope_type']!r} for {WINDOWED}; only 'default' is supported")
        fields = {"position_embedding_type": "rope", "rotary_base": whole_base(self.base if base is None else base)}
        if any(kind == WINDOWED for kind in config["layer_types"] or (WINDOWED,)):
            fields["rotary_base_local"] = float(self.local_base if local_base is None else local_base)
        return {**fields, **scaling_fields(key, full, config)}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns the keys of older releases if they can express the values, otherwise `rope_parameters`."""
        base, local = float(values["rotary_base"]), values["rotary_base_local"]
        if local is None:  # layers with a window have the others' base, and a scaling cannot be expressed for them
            local = base if rope_scaling_of(values) is None else self.local_base
        if self.local_key:
            scaling = {} if scaling_key(values) is None else {"rope_scaling": scaling_key(values)}
            return {self.base_key: base, self.local_key: float(local), **scaling}
        if (base, local) == (self.base, self.local_base):
            return {"rope_theta": base, "rope_scaling": scaling_key(values)}
        full = {"rope_type": "default", **(scaling_key(values) or {}), "rope_theta": base}
        windowed = {"rope_type": "default", "rope_theta": float(local)}
        return {"rope_parameters": {FULL: full, WINDOWED: windowed}}
