"""Settings by layer: the parts of each layer, and patterns given as a period or as a list with an entry for each
layer."""

import copy
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron.core.transformer.config.heterogeneous import DescribedLayer, described_layers

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

# ---------------------------------------------------------------------------------------------------------------------
# Parts of a layer


class LayerParts(NamedTuple):
    """The two branches of a layer. Each has its norm and is added to the residual stream; None: the layer lacks it.

    The specs of the branches are in `models/gpt/gpt_layer_specs.py`, their costs in `layer_costs.py`, by these names.
    """

    token_mixer: Literal["attention", "gated_delta_net", "mamba", "dsa", "linear"] | None
    """The branch that lets tokens see each other."""
    channel_mixer: Literal["mlp", "moe", "linear"] | None
    """The branch that transforms each token by itself."""


HYBRID_LAYERS = {
    "M": LayerParts("mamba", None),
    "*": LayerParts("attention", None),
    "-": LayerParts(None, "mlp"),
    "E": LayerParts(None, "moe"),
    "G": LayerParts("gated_delta_net", None),
    "D": LayerParts("dsa", None),
}
"""The parts of a layer for each letter of a `hybrid_layer_pattern`."""

STAGE_BORDER = "|"
"""Ends a pipeline stage in a `hybrid_layer_pattern`."""


PREDICTION_BORDER = "/"
"""Begins the letters of a depth of multi-token prediction in a `hybrid_layer_pattern`."""


def hybrid_letters(config: "TransformerConfig") -> str | None:
    """Returns the letter of each decoder layer of a hybrid model; None for other models."""
    pattern = config.hybrid_layer_pattern
    return None if pattern is None else pattern.partition(PREDICTION_BORDER)[0].replace(STAGE_BORDER, "")


def without_stages(pattern: str | None) -> str | None:
    """Returns a pattern without the ends of pipeline stages, which belong to the layout, not to the model."""
    return None if pattern is None else pattern.replace(STAGE_BORDER, "")


def prediction_letters(config: "TransformerConfig") -> list[str]:
    """Returns the letters of each depth of multi-token prediction of a hybrid model, such as `*E`; empty for other
    models."""
    pattern = config.hybrid_layer_pattern
    return [] if pattern is None else pattern.split(PREDICTION_BORDER)[1:]


def parts_of_letters(letters: str) -> LayerParts | None:
    """Returns the parts of a depth of multi-token prediction: the part of one letter, or a token mixer and a channel
    mixer. None for other letters."""
    parts = [HYBRID_LAYERS.get(letter, LayerParts(None, None)) for letter in letters]
    if len(parts) == 1 and parts[0] != LayerParts(None, None):
        return parts[0]
    if len(parts) == 2 and parts[0].token_mixer and parts[1].channel_mixer:
        return LayerParts(parts[0].token_mixer, parts[1].channel_mixer)
    return None


def has_mixer(config: "TransformerConfig", mixer: str) -> bool:
    """Returns whether some layer may have this token mixer, by `experimental_attention_variant` or by its letter."""
    letters = hybrid_letters(config)
    if letters is None:
        return bool(config.experimental_attention_variant == mixer)
    letters += "".join(prediction_letters(config))
    return any(letter in HYBRID_LAYERS and HYBRID_LAYERS[letter].token_mixer == mixer for letter in letters)


def has_heads(config: "TransformerConfig") -> bool:
    """Whether some layer has attention heads: all models but hybrid ones without attention."""
    letters = hybrid_letters(config)
    return letters is None or bool({"*", "D"} & set(letters + "".join(prediction_letters(config))))


def stages_of_pattern(pattern: str | None) -> str | None:
    """Returns the `pipeline_model_parallel_layout` of the stages that a `hybrid_layer_pattern` marks; None if it marks
    none."""
    if pattern is None or STAGE_BORDER not in pattern:
        return None
    decoder, *depths = pattern.split(PREDICTION_BORDER)
    stages = STAGE_BORDER.join("t" * len(stage) for stage in decoder.split(STAGE_BORDER))
    return f"E{stages}{'m' * len(depths)}L"


def evenly_mixed(num_layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """Returns the pattern of a hybrid model with these shares of attention and MLP layers; the others are Mamba-2
    layers. The attention layers have equal distances, and Mamba-2 layers are spread evenly over the remaining layers,
    from the first one on: 56 layers with shares of 0.08 and 0.5 give the pattern of Waleffe et al. 2024
    (arXiv:2406.07887)."""
    attention = round(num_layers * attention_ratio)
    mamba = max(0, num_layers - attention - round(num_layers * mlp_ratio))
    others = num_layers - attention
    places = {int(index * others / mamba + 0.5) for index in range(mamba)}
    rest = ["M" if index in places else "-" for index in range(others)]
    for index in range(attention):
        rest.insert(int((index + 1) * others / (attention + 1) + 0.5) + index, "*")
    return "".join(rest)


def layer_parts(config: "TransformerConfig", layer_number: int) -> LayerParts:
    """Returns the parts of a layer (counted from 1). Layers of multi-token prediction have the parts of the decoder's
    last layer; in a hybrid model they have their own letters."""
    letters, predictions = hybrid_letters(config), prediction_letters(config)
    if predictions and layer_number > config.num_layers:
        parts = parts_of_letters(predictions[layer_number - config.num_layers - 1])
        assert parts is not None, "the config has checked the letters"
        return parts
    if letters is not None:
        return HYBRID_LAYERS[letters[as_decoder_layer(config, layer_number) - 1]]
    described = described_layer(config, layer_number)
    if described is not None:
        return LayerParts(described.attention, described.mlp)
    return LayerParts(_token_mixer(config, layer_number), "moe" if has_experts(config, layer_number) else "mlp")


def described_layer(config: "TransformerConfig", layer_number: int) -> DescribedLayer | None:
    """Returns the description of a layer (counted from 1) of a heterogeneous model; None for other models."""
    layers = described_layers(config)
    return None if layers is None else layers[as_decoder_layer(config, layer_number) - 1]


def with_sizes_of(config: "TransformerConfig", layer: DescribedLayer | None) -> "TransformerConfig":
    """Returns the config with the sizes of a described layer; the config itself without a description."""
    if layer is None:
        return config
    own = copy.copy(config)
    own.num_query_groups = layer.num_query_groups or config.num_query_groups
    own.ffn_hidden_size = layer.ffn_hidden_size or config.ffn_hidden_size
    return own


def _token_mixer(config: "TransformerConfig", layer_number: int) -> Literal["attention", "gated_delta_net", "dsa"]:
    """Returns the token mixer of a layer that has one: dsa in all layers, or gated_delta_net in the layers of
    `linear_attention_freq` (all except every N-th, or those with a 1 in the list)."""
    if config.experimental_attention_variant == "gated_delta_net":
        return "gated_delta_net" if _holds(config, layer_number, "linear_attention_freq") else "attention"
    return "dsa" if config.experimental_attention_variant == "dsa" else "attention"


# ---------------------------------------------------------------------------------------------------------------------
# Patterns


def as_decoder_layer(config: "TransformerConfig", layer_number: int) -> int:
    """Returns the number of the decoder layer whose settings a layer has. Layers of multi-token prediction are numbered
    after the decoder's last layer and have its settings."""
    return min(layer_number, config.num_layers)


def is_windowed(config: "TransformerConfig", layer_number: int) -> bool:
    """Returns whether a layer (counted from 1) has a window: all layers, or with `window_attn_skip_freq` all except
    every N-th, or those with a 1 in the list."""
    return config.window_size is not None and _holds(config, layer_number, "window_attn_skip_freq")


def is_chunked(config: "TransformerConfig", layer_number: int) -> bool:
    """Returns whether a layer (counted from 1) attends to chunks. `attention_chunk_skip_freq` selects layers like
    `window_attn_skip_freq` in `is_windowed`."""
    return config.attention_chunk_size is not None and _holds(config, layer_number, "attention_chunk_skip_freq")


def has_rope(config: "TransformerConfig", layer_number: int) -> bool:
    """Returns whether a layer (counted from 1) has rotary positions: with `no_rope_freq` all except every N-th, or
    those with a 0 in the list."""
    return _holds(config, layer_number, "no_rope_freq", entry=0)


def _holds(config: "TransformerConfig", layer_number: int, name: str, entry: int = 1) -> bool:
    """Evaluates the pattern of this name. None: all layers; N: all except every N-th; a list: layers with this
    entry."""
    pattern = getattr(config, name)
    if pattern is None:
        return True
    layer_number = as_decoder_layer(config, layer_number)
    if isinstance(pattern, int):
        return layer_number % pattern != 0
    return bool(pattern[layer_number - 1]) == bool(entry)


def has_experts(config: "TransformerConfig", layer_number: int) -> bool:
    """Returns whether a layer (counted from 1) has experts instead of one MLP: by `moe_layer_freq` the first layer and
    every N-th from there, or those with a 1 in the list; in a hybrid model those with the letter E."""
    if config.hybrid_layer_pattern is not None:
        return layer_parts(config, layer_number).channel_mixer == "moe"
    if config.num_moe_experts is None:
        return False
    layer_number = as_decoder_layer(config, layer_number)
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        return (layer_number - 1) % pattern == 0
    return bool(pattern[layer_number - 1])
