"""EXAONE 4: norms after attention and MLP, normed heads, and layers with a window between layers without positions."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder
from megatron.conversion.cohere import NoPositionsWithoutWindow
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.layer_types import WindowsByLayerType

_WINDOWS = WindowsByLayerType(period=4, period_key="sliding_window_pattern")


@dataclass(frozen=True)
class WindowsOrNone(rules.Rule):
    """Windows by type of layer; a model whose `sliding_window` is null has none, and positions in all layers."""

    reads = _WINDOWS.reads

    def fields(self, config: Json) -> dict[str, object]:
        """Returns windows, and layers without positions."""
        if config["sliding_window"] is None:
            return {}
        return _WINDOWS.fields(config) | NoPositionsWithoutWindow(_WINDOWS).fields(config)

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns window and types of layers."""
        if values["window_size"] is None and values["no_rope_freq"] is None:
            return {"sliding_window": None, "layer_types": ["full_attention"] * values["num_layers"]}
        return _WINDOWS.keys(values)


EXAONE4_FAMILY = Family(
    "Exaone4ForCausalLM",
    "exaone4",
    decoder.ENDS
    | decoder.weights(
        {
            "post_attention_layernorm": "post_attention_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        }
    )
    | decoder.ATTENTION
    | decoder.HEAD_NORMS
    | decoder.MLP,
    (
        *decoder.DECODER,
        WindowsOrNone(),
        rules.Implied({"norm_placement": "post", "qk_layernorm": True}),
    ),
)
