"""Rules for attention, biases of linear layers, and experts in config.json (see config_rules.py)."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.conversion.config_rules import Rule, Values, checked_types, layers_of
from megatron.conversion.hub_defaults import Json
from megatron.conversion.spellings import bias_places, router_weights_sum_to_one, run_of, score_scale
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import has_experts, is_windowed


@dataclass(frozen=True)
class ScoreScale(Rule):
    """A key for the factor of attention scores. Its value is the factor, or with `query_scalar` 1 / the factor
    squared."""

    key: str
    query_scalar: bool = False

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the factor."""
        value = config[self.key]
        if not value > 0:
            raise UserError(f"{self.key} is {value}; it must be larger than 0")
        return {"softmax_scale": float(value) ** -0.5 if self.query_scalar else float(value)}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns the key; a number that is none of transformers' integers is rounded."""
        scale = score_scale(values)
        if scale is None:
            return {}
        return {self.key: max(1, round(scale**-2)) if self.query_scalar else scale}


@dataclass(frozen=True)
class AttentionHeads(Rule):
    """Number of query heads, number of key-value heads, and width of a head."""

    reads = ("num_attention_heads", "num_key_value_heads", "head_dim")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the three numbers. A width that is null or absent is hidden_size / num_attention_heads."""
        heads, groups, width = config["num_attention_heads"], *(config.get(key) for key in self.reads[1:])
        if heads < 1:
            raise UserError(f"num_attention_heads is {heads}; it must be at least 1")
        groups = heads if groups is None else groups
        return {
            "num_attention_heads": heads,
            **({} if groups == heads else {"group_query_attention": True, "num_query_groups": groups}),
            "kv_channels": config["hidden_size"] // heads if width is None else width,
        }

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns all three keys."""
        return {
            "num_attention_heads": values["num_attention_heads"],
            "num_key_value_heads": values["num_query_groups"],
            "head_dim": values["kv_channels"],
        }


@dataclass(frozen=True)
class Biases(Rule):
    """A key for the biases of some linear layers, or of all."""

    key: str
    places: tuple[str, ...] = ()
    """Our switches; empty: all linear layers."""

    def fields(self, config: Json) -> dict[str, object]:
        """Returns a switch for each of these layers if they have biases."""
        has = bool(config[self.key])
        if not self.places:
            return {"add_bias_linear": has}
        return {"add_bias_linear": False, **(dict.fromkeys(self.places, True) if has else {})}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns whether all of these layers have biases."""
        has = bias_places(values)
        return {self.key: all(bool(has.get(place, values.get(place))) for place in self.places or has)}


ATTENTION_BIASES = Biases("attention_bias", ("add_qkv_bias", "attention_output_bias"))
MLP_BIASES = Biases("mlp_bias", ("mlp_bias",))


@dataclass(frozen=True)
class Words(Rule):
    """A key whose value is a word, and our fields for each word that is supported."""

    key: str
    meanings: Mapping[str, Values]
    """Fields by word. Of words with one meaning, the first is written."""

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the fields of the word. Raises UserError for other words."""
        word = config[self.key]
        if word not in self.meanings:
            raise UserError(f"{self.key} is {word!r}; {', '.join(self.meanings)} are supported")
        return dict(self.meanings[word])

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns the first word that says what the values say; the first of all if none does."""
        fits = (word for word, fields in self.meanings.items() if all(values[name] == fields[name] for name in fields))
        return {self.key: next(fits, next(iter(self.meanings)))}


GATED_ACTIVATIONS: Mapping[str, Values] = {
    "silu": {"swiglu": True},
    "swish": {"swiglu": True},
    "gelu": {"exact_geglu": True},
    "gelu_pytorch_tanh": {"geglu": True},
    "gelu_new": {"geglu": True},
    "gelu_tanh": {"geglu": True},
}
"""Activations of a gated MLP: SiLU, GELU, or GELU's tanh approximation."""


@dataclass(frozen=True)
class SlidingWindows(Rule):
    """Sliding windows of attention in all layers (`sliding_window` alone), or in those that config.json names.

    A window of W tokens includes the token itself, so it is our `window_size` (W - 1, 0).
    """

    by_layer: bool = False
    alternate: bool = False
    """Without `layer_types`: every other of the first `max_window_layers` layers has a window, beginning with the first
    one, instead of all behind them."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys."""
        more = ("use_sliding_window", "max_window_layers", "layer_types")
        return ("sliding_window", *more) if self.by_layer else ("sliding_window",)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns window size and layers; nothing if no layer has a window."""
        width, pattern = config["sliding_window"], self._windowed_layers(config)
        if width is None or not any(pattern):
            return {}
        if width < 1:
            raise UserError(f"sliding_window is {width}; it must be at least 1")
        return {"window_size": (width - 1, 0), "window_attn_skip_freq": None if all(pattern) else pattern}

    def _windowed_layers(self, config: Json) -> list[int]:
        """Returns 1 for each layer with a window and 0 for each other layer."""
        count = config["num_hidden_layers"]
        if not self.by_layer:
            return [1] * count
        is_on = config["use_sliding_window"] and config["sliding_window"] is not None
        kinds = config.get("layer_types")
        if kinds is None:
            first = config.get("max_window_layers", 0)
            if self.alternate:
                return [int(is_on and layer % 2 == 0 and layer < first) for layer in range(count)]
            return [int(is_on and layer >= first) for layer in range(count)]
        known = ("sliding_attention", "full_attention")
        kinds = checked_types(config, "layer_types", known, " and ".join(known))
        if "sliding_attention" in kinds and not is_on:
            raise UserError("layer_types has 'sliding_attention', but use_sliding_window or sliding_window is off")
        return [int(kind == "sliding_attention") for kind in kinds]

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns all keys that the family has. A window of another form than (W - 1, 0) is left out."""
        count, window = values["num_layers"], values["window_size"]
        if window is None or window[1] != 0 or window[0] < 0:
            return {"sliding_window": None, **({"use_sliding_window": False} if self.by_layer else {})}
        if not self.by_layer:
            return {"sliding_window": window[0] + 1}
        config = run_of(values)
        pattern = [is_windowed(config, layer) for layer in range(1, count + 1)]
        return {
            "sliding_window": window[0] + 1,
            "use_sliding_window": True,
            "max_window_layers": pattern.index(True) if True in pattern else count,
            "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in pattern],
        }


@dataclass(frozen=True)
class SwitchedWindows(Rule):
    """Sliding windows in all layers, or in none (`use_sliding_window`). Releases of transformers before 5 had none in
    the first `max_window_layers` layers, which later ones do not apply."""

    reads = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the window; nothing if windows are switched off, where the other keys have no meaning."""
        return SlidingWindows().fields(config) if config["use_sliding_window"] else {}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns the window and the switch."""
        width = SlidingWindows().keys(values)["sliding_window"]
        return {
            "sliding_window": width,
            "use_sliding_window": width is not None,
            **({} if width is None else {"max_window_layers": 0}),
        }

    def note(self, config: Json) -> str | None:
        """Returns a sentence if layers without a window are asked for."""
        first = config.get("max_window_layers")
        if not config["use_sliding_window"] or not first:
            return None
        return f"max_window_layers is {first}, which transformers does not apply: all layers have a window"


@dataclass(frozen=True)
class RouterWeights(Rule):
    """Weights of a token's experts: softmax probabilities over all experts, either divided by their sum over the chosen
    experts (`norm_topk_prob`) or not.

    The divided probabilities equal a softmax over the logits of the chosen experts alone.
    """

    key: str | None = "norm_topk_prob"
    """None: the family has no such key and always divides."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The key, if the family has one."""
        return ("num_experts_per_tok", *(() if self.key is None else (self.key,)))

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the router's fields."""
        fields = {"moe_router_topk": config["num_experts_per_tok"], "moe_router_score_function": "softmax"}
        if self.key is not None and not config[self.key]:
            return fields | {"moe_router_pre_softmax": True}
        if config["num_experts_per_tok"] == 1:  # a softmax over one logit is refused
            return fields | {"moe_router_pre_softmax": True, "moe_router_norm_topk_prob": True}
        return fields | {"moe_router_pre_softmax": False}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns the number of experts of a token, and the key."""
        keys: dict[str, Json] = {"num_experts_per_tok": values["moe_router_topk"]}
        return keys if self.key is None else keys | {self.key: router_weights_sum_to_one(values)}


@dataclass(frozen=True)
class ExpertLayers(Rule):
    """Layers that have experts: every `decoder_sparse_step`-th, except `mlp_only_layers` (counted from 0)."""

    reads = ("decoder_sparse_step", "mlp_only_layers")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the pattern of layers."""
        step, dense = config["decoder_sparse_step"], config["mlp_only_layers"] or []
        if step < 1:
            raise UserError(f"decoder_sparse_step is {step}; it must be at least 1")
        pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(config["num_hidden_layers"])]
        return {"moe_layer_freq": layers_of(pattern)}

    def keys(self, values: Values) -> dict[str, Json]:
        """Returns both keys; all exceptions are in `mlp_only_layers`."""
        config = run_of(values)
        dense = [layer for layer in range(config.num_layers) if not has_experts(config, layer + 1)]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
