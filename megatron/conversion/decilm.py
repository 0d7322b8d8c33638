"""NVIDIA's Nemotron-NAS models (Llama-3.1-Nemotron-51B and Ultra-253B, Llama-3.3-Nemotron-Super-49B), which have no
class in transformers: Llamas whose layers have their own key and value heads and widths, or lack parts
(Bercovich et al. 2024, arXiv:2411.19146)."""

import json
from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS, one_to_one
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.rope import RotaryPositions
from megatron.conversion.spellings import sized_layers
from megatron.conversion.tensor_mapping import TensorMapping
from megatron.core.exceptions import UserError
from megatron.core.transformer.config.heterogeneous import HETEROGENEOUS, DescribedLayer, mlp_width

_BLOCKS, _TEXT = "block_configs", "heterogeneous_layers_config_encoded_json"
_MOST_DIGITS = 5


@dataclass(frozen=True)
class BlockConfigs(rules.Rule):
    """The description of each layer. `intermediate_size` and `num_key_value_heads` are null, as layers have their
    own."""

    reads = (_BLOCKS, "intermediate_size", "num_key_value_heads")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the description as JSON."""
        if not isinstance(config.get(_BLOCKS), list):
            raise UserError(f"{_BLOCKS} is missing, the list with an entry for each layer")
        return {_TEXT: json.dumps({_BLOCKS: config[_BLOCKS]}, separators=(",", ":"))}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the descriptions with all sizes; nothing for a model without them, or if a width has no
        `ffn_mult`."""
        layers = sized_layers(values)
        blocks = [_block(layer, values) for layer in layers or ()]
        if not blocks or None in blocks:
            return {}
        return {_BLOCKS: blocks, "intermediate_size": None, "num_key_value_heads": None}


def _block(layer: DescribedLayer, values: rules.Values) -> dict[str, Json] | None:
    heads = values["num_attention_heads"]
    attention: dict[str, Json] = {"n_heads_in_group": None, "no_op": False, "replace_with_linear": False}
    ffn: dict[str, Json] = {"ffn_mult": None, "no_op": False, "replace_with_linear": False}
    for part, kind in ((attention, layer.attention), (ffn, layer.mlp)):
        part["no_op"], part["replace_with_linear"] = kind is None, kind == "linear"
    if layer.num_query_groups is not None:
        attention["n_heads_in_group"] = heads // layer.num_query_groups
    if layer.ffn_hidden_size is not None:
        ffn["ffn_mult"] = _multiple(layer.ffn_hidden_size, values["hidden_size"])
        if ffn["ffn_mult"] is None:
            return None
    return {"attention": attention, "ffn": ffn}


def _multiple(width: int, hidden_size: int) -> float | None:
    """Returns the shortest `ffn_mult` that gives an MLP this width; None for a width that none gives."""
    exact = 1.5 * width / hidden_size
    rounded = (round(exact, digits) for digits in range(_MOST_DIGITS))
    return next((value for value in (*rounded, exact) if value > 0 and mlp_width(value, hidden_size) == width), None)


_TENSORS = decoder.LLAMA | one_to_one(
    {
        f"{OURS}.{ours}.{kind}": f"{HUB}.{hub}.{kind}"
        for ours, hub in (("self_attention", "self_attn.linear_attn"), ("mlp", "mlp.linear_mlp"))
        for kind in ("weight", "bias")
    }
)


def _tensors(values: rules.Values) -> TensorMapping:
    """Hub tensors of models whose layers have a list; other models are not of this family."""
    return _TENSORS if any(values.get(name) for name in HETEROGENEOUS) else {}


DECILM_FAMILY = Family(
    "DeciLMForCausalLM",
    "nemotron-nas",
    _tensors,
    (
        *decoder.SIZES,
        decoder.EPSILON,
        BlockConfigs(),
        rules.Copied("num_attention_heads", "num_attention_heads"),
        layer_rules.ATTENTION_BIASES,
        layer_rules.MLP_BIASES,
        layer_rules.Words("hidden_act", layer_rules.GATED_ACTIVATIONS),
        RotaryPositions(),
    ),
)
