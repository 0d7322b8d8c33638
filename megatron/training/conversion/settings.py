"""What keys of config.json say, as values of our fields, and back: small rules that a family is put together from.

A rule names the keys it reads. `fields(config)` gives our values, by field name; `keys(values)` the keys again, out of
all values of a run. Where a family cannot say something, `keys` leaves it out: whoever exports reads the keys back and
compares, so that nothing is lost unseen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import has_experts, is_windowed

Json = Any
Values = Mapping[str, Any]

REQUIRED: Any = object()
"""In place of a default: config.json has to have the key."""


class Rule(Protocol):
    """Keys of config.json and the fields that they are."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys that it looks at."""

    def fields(self, config: Json) -> dict[str, Any]:
        """Our values. Raises UserError, naming key and value, for what cannot be had."""

    def keys(self, values: Values) -> dict[str, Json]:
        """The keys that say these values, as far as they can."""


def value_of(config: Json, key: str, default: Any = REQUIRED) -> Any:
    """The key's value; null counts as not there."""
    value = config.get(key)
    if value is None:
        if default is REQUIRED:
            raise UserError(f"config.json has no {key}")
        return default
    return value


@dataclass(frozen=True)
class Same:
    """One key, one field, the same value."""

    key: str
    field: str
    default: Any = REQUIRED
    also: str = ""
    """Another name of the key, in other releases; read, and written too."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.key, self.also) if self.also else (self.key,)

    def fields(self, config: Json) -> dict[str, Any]:
        there = [key for key in self.reads if config.get(key) is not None]
        return {self.field: value_of(config, there[0] if there else self.key, self.default)}

    def keys(self, values: Values) -> dict[str, Json]:
        return dict.fromkeys(self.reads, values[self.field])


@dataclass(frozen=True)
class Only:
    """A key that has to have the one value that can be had."""

    key: str
    value: Any
    write: bool = True

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.key,)

    def fields(self, config: Json) -> dict[str, Any]:
        found = value_of(config, self.key, self.value)
        if found != self.value:
            raise UserError(f"config.json: {self.key} {found!r} cannot be had here; {self.value!r} can")
        return {}

    def keys(self, values: Values) -> dict[str, Json]:
        return {self.key: self.value} if self.write else {}


@dataclass(frozen=True)
class Always:
    """Fields that every model of the family has, and no key says."""

    values: Values

    reads = ()

    def fields(self, config: Json) -> dict[str, Any]:
        return dict(self.values)

    def keys(self, values: Values) -> dict[str, Json]:
        return {}


@dataclass(frozen=True)
class Heads:
    """Query heads, groups of keys and values, and the width of a head."""

    width: int | None = None
    """Width where config.json does not say; None: hidden size / heads."""

    reads = ("num_attention_heads", "num_key_value_heads", "head_dim")

    def fields(self, config: Json) -> dict[str, Any]:
        heads = value_of(config, "num_attention_heads")
        groups = value_of(config, "num_key_value_heads", heads)
        return {
            "num_attention_heads": heads,
            **({} if groups == heads else {"group_query_attention": True, "num_query_groups": groups}),
            "kv_channels": value_of(config, "head_dim", self.width or value_of(config, "hidden_size") // heads),
        }

    def keys(self, values: Values) -> dict[str, Json]:
        return {
            "num_attention_heads": values["num_attention_heads"],
            "num_key_value_heads": values["num_query_groups"],
            "head_dim": values["kv_channels"],
        }


@dataclass(frozen=True)
class Biases:
    """Biases of all projections of attention, and of the MLP's."""

    reads = ("attention_bias", "mlp_bias")

    def fields(self, config: Json) -> dict[str, Any]:
        of_attention, of_mlp = (value_of(config, key, False) for key in self.reads)
        fields: dict[str, Any] = {"add_bias_linear": False}
        if of_attention:
            fields |= {"add_qkv_bias": True, "attention_output_bias": True}
        return fields | ({"mlp_bias": True} if of_mlp else {})

    def keys(self, values: Values) -> dict[str, Json]:
        return {"attention_bias": bool(values["attention_output_bias"]), "mlp_bias": bool(values["mlp_bias"])}


@dataclass(frozen=True)
class Tied:
    """Whether the head uses the embedding's weight."""

    reads = ("tie_word_embeddings",)

    def fields(self, config: Json) -> dict[str, Any]:
        return {"untie_embeddings_and_output_weights": not value_of(config, "tie_word_embeddings", False)}

    def keys(self, values: Values) -> dict[str, Json]:
        return {"tie_word_embeddings": not values["untie_embeddings_and_output_weights"]}


@dataclass(frozen=True)
class Windows:
    """Sliding windows, of all layers (`sliding_window` alone) or of those that config.json names. A window of W tokens
    has the token itself in it."""

    by_layer: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        mine = ("use_sliding_window", "max_window_layers", "layer_types")
        return ("sliding_window", *mine) if self.by_layer else ("sliding_window",)

    def fields(self, config: Json) -> dict[str, Any]:
        width, count = value_of(config, "sliding_window", None), value_of(config, "num_hidden_layers")
        pattern = self._windowed(config, count)
        if width is None or not any(pattern):
            return {}
        return {"window_size": (width - 1, 0), "window_attn_skip_freq": None if all(pattern) else pattern}

    def _windowed(self, config: Json, count: int) -> list[int]:
        if not self.by_layer:
            return [1] * count
        if not value_of(config, "use_sliding_window", False):
            return [0] * count
        kinds = value_of(config, "layer_types", None)
        if kinds is not None:
            return [int(kind == "sliding_attention") for kind in kinds]
        first = value_of(config, "max_window_layers")
        return [int(layer >= first) for layer in range(count)]

    def keys(self, values: Values) -> dict[str, Json]:
        count, window = values["num_layers"], values["window_size"]
        if window is None or window[1] != 0 or window[0] < 0:
            return {"sliding_window": None, **({"use_sliding_window": False} if self.by_layer else {})}
        if not self.by_layer:
            return {"sliding_window": window[0] + 1}
        config = SimpleNamespace(**values)
        pattern = [is_windowed(config, layer) for layer in range(1, count + 1)]
        return {
            "sliding_window": window[0] + 1,
            "use_sliding_window": True,
            "max_window_layers": pattern.index(True) if True in pattern else count,
            "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in pattern],
        }


@dataclass(frozen=True)
class Router:
    """How picked experts are weighted: by a softmax over themselves, which is that over all, made to sum to one again;
    or (`norm_topk_prob` false) by the softmax over all as it is."""

    reads = ("norm_topk_prob",)

    def fields(self, config: Json) -> dict[str, Any]:
        return {"moe_router_pre_softmax": not value_of(config, "norm_topk_prob", False)}

    def keys(self, values: Values) -> dict[str, Json]:
        return {"norm_topk_prob": not values["moe_router_pre_softmax"]}


@dataclass(frozen=True)
class SparseLayers:
    """Which layers have experts: every `decoder_sparse_step`-th, but for `mlp_only_layers` (counted from 0)."""

    reads = ("decoder_sparse_step", "mlp_only_layers")

    def fields(self, config: Json) -> dict[str, Any]:
        step, dense = value_of(config, "decoder_sparse_step", 1), value_of(config, "mlp_only_layers", [])
        pattern = [
            int(layer not in dense and (layer + 1) % step == 0)
            for layer in range(value_of(config, "num_hidden_layers"))
        ]
        return {"moe_layer_freq": 1 if all(pattern) else pattern}

    def keys(self, values: Values) -> dict[str, Json]:
        config = SimpleNamespace(**values)
        dense = [layer for layer in range(config.num_layers) if not has_experts(config, layer + 1)]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
