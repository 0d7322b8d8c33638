"""Models whose layers have different sizes, described in JSON, such as NVIDIA's Nemotron-NAS models
(Llama-3.3-Nemotron-Super; Bercovich et al. 2024, arXiv:2411.19146).

`block_configs` has an entry for each layer, with its `attention` and its `ffn`. Each of the two is left out (`no_op`),
is one linear layer (`replace_with_linear`), or has its own size. The size of `attention` is `num_query_groups` or
`n_heads_in_group` (query heads per group), that of `ffn` is `intermediate_size`, `ffn_mult` or, as
in Megatron-LM, `ffn_hidden_size`.
"""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatron.core.declarations.config_fields import flag, literal_text
from megatron.core.exceptions import UserError

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

HETEROGENEOUS = ("heterogeneous_layers_config_encoded_json", "heterogeneous_layers_config_path")
"""Fields that can hold the description; the first one that is given is used."""


@dataclass(kw_only=True)
class HeterogeneousConfig:
    """A description of each layer."""

    heterogeneous_layers_config_path: str | None = None
    """JSON file whose block_configs describe each layer, in the format of config.json of NVIDIA's Nemotron-NAS models:
    key and value heads, width of the MLP, and parts that are left out or replaced by one linear layer."""

    heterogeneous_layers_config_encoded_json: str | None = flag(None, from_checkpoint=True)
    """The text of such a file. Checkpoints keep it; if it is given, --heterogeneous-layers-config-path is not read."""


class DescribedLayer(NamedTuple):
    """The description of one layer."""

    attention: Literal["attention", "linear"] | None
    mlp: Literal["mlp", "linear"] | None
    num_query_groups: int | None
    """None: that of the model."""
    ffn_hidden_size: int | None
    """None: that of the model."""


def described_layers(config: "TransformerConfig") -> tuple[DescribedLayer, ...] | None:
    """Returns the description of each layer; None for a model without descriptions. Raises UserError that names the key
    of a wrong value."""
    text = _text(config)
    return None if text is None else _read(text, config.num_layers, config.hidden_size, config.num_attention_heads)


def encoded_layers(config: "TransformerConfig") -> str | None:
    """Returns the description of the layers as JSON of `block_configs` alone; None for a model without one."""
    text = _text(config)
    if text is None or described_layers(config) is None:
        return None
    return json.dumps({"block_configs": json.loads(text)["block_configs"]}, separators=(",", ":"))


def _text(config: "TransformerConfig") -> str | None:
    given, path = config.heterogeneous_layers_config_encoded_json, config.heterogeneous_layers_config_path
    if given is not None or path is None:
        return given
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# The format

_LARGEST_WIDTH = 1 << 40
"""Upper limit of a size times the hidden size. A larger number is a mistake, and would overflow."""

_SIZES = {
    "attention": ("num_query_groups", "n_heads_in_group"),
    "ffn": ("intermediate_size", "ffn_hidden_size", "ffn_mult"),
}
"""Keys of a size; the last one gives it in another unit."""
_OFF = {
    "attention": (
        *("num_sink_tokens", "sparsify", "unshifted_sink"),
        *("use_prefill_window_in_sink_attention", "window_length"),
    ),
    "ffn": ("sparsify",),
}
"""Further keys of published files. Their features are not supported, so they must be null or false."""


@functools.lru_cache(maxsize=64)
def _read(text: str, num_layers: int, hidden_size: int, num_heads: int) -> tuple[DescribedLayer, ...]:
    """Returns the layers of a model of these sizes. Checks the sizes that the file names, and ignores its other
    keys."""
    try:
        whole = json.loads(text)
    except ValueError as error:
        raise UserError(f"this is not JSON: {error}") from error
    blocks = whole.get("block_configs") if isinstance(whole, dict) else None
    if not isinstance(blocks, list):
        raise UserError("there must be a list block_configs, with an entry for each layer")
    sizes = {"num_hidden_layers": num_layers, "hidden_size": hidden_size, "num_attention_heads": num_heads}
    for key, size in sizes.items():
        if whole.get(key, size) != size:
            raise UserError(f"{key} is {json.dumps(whole[key])}, but the model has {size}")
    if len(blocks) != num_layers:
        raise UserError(f"block_configs has {len(blocks)} entries for {num_layers} layers; give one for each layer")
    return tuple(_layer(block, f"block_configs[{index}]", hidden_size, num_heads) for index, block in enumerate(blocks))


def _layer(block: Any, place: str, hidden_size: int, num_heads: int) -> DescribedLayer:
    _check_keys(block, place, ("attention", "ffn"))
    sizes: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    for part, own in (("attention", "attention"), ("ffn", "mlp")):
        values, here = block.get(part, {}), f"{place}.{part}"
        _check_keys(values, here, ("no_op", "replace_with_linear", *_SIZES[part], *_OFF[part]))
        for key in _OFF[part]:
            if values.get(key) not in (None, False):
                raise UserError(f"{here}.{key} is {json.dumps(values[key])}: not yet; null or false works")
        kinds[part] = _kind(values, here, own)
        sizes[part] = _size(values, here, part, hidden_size, num_heads) if kinds[part] == own else None
    return DescribedLayer(kinds["attention"], kinds["ffn"], sizes["attention"], sizes["ffn"])


def _check_keys(values: object, place: str, known: tuple[str, ...]) -> None:
    if not isinstance(values, dict):
        raise UserError(f"{place} is {json.dumps(values)}; it must be an object with the keys {', '.join(known)}")
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise UserError(f"{place}.{unknown[0]}: unknown key; the keys are {', '.join(known)}")


def _kind(values: dict[str, object], place: str, own: str) -> str | None:
    """Returns the kind of a part: `own` unless it is left out or replaced."""
    left_out, replaced = (values.get(key) for key in ("no_op", "replace_with_linear"))
    for key, value in (("no_op", left_out), ("replace_with_linear", replaced)):
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{place}.{key} is {json.dumps(value)}; it must be true or false")
    if left_out and replaced:
        raise UserError(f"{place} has both no_op and replace_with_linear; give one of the two")
    return None if left_out else "linear" if replaced else own


def _size(values: dict[str, Any], place: str, part: str, hidden_size: int, num_heads: int) -> int | None:
    """Returns the query groups of attention or the width of an MLP; None if the layer has those of the model."""
    sizes = {key: values[key] for key in _SIZES[part] if values.get(key) is not None}
    for key, value in sizes.items():
        kinds, what = ((int, float), "number") if key == "ffn_mult" else ((int,), "whole number")
        if type(value) not in kinds or not 0 < value < math.inf:
            raise UserError(f"{place}.{key} is {json.dumps(value)}; it must be a positive {what}")
        if value * hidden_size > _LARGEST_WIDTH:
            raise UserError(f"{place}.{key} is {json.dumps(value)}; a layer is not that large")
        if part == "attention" and num_heads % value:
            raise UserError(f"{place}.{key} {value} does not divide the {num_heads} attention heads")
    if not sizes:
        return None
    last, value = sizes.popitem()
    implied: int = num_heads // value if last == "n_heads_in_group" else value
    implied = mlp_width(value, hidden_size) if last == "ffn_mult" else implied
    for key, size in sizes.items():
        if size != implied:
            raise UserError(f"{place}.{key} is {size}, but {last} {value} makes it {implied}")
    return implied


def mlp_width(multiple: float, hidden_size: int) -> int:
    """Returns the width of an MLP with this `ffn_mult`: 2/3 * ffn_mult * hidden size, rounded up to a multiple of
    256."""
    return -(-int(2 * multiple * hidden_size / 3) // 256) * 256


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def validate(config: "TransformerConfig") -> Iterator[str]:
    """Yields a problem for a description that is wrong, or cannot be combined with other fields; `config` has the
    fields of TransformerConfig."""
    encoded, path = (getattr(config, name) for name in HETEROGENEOUS)
    if encoded is path is None or not all((getattr(config, name) or 0) >= 1 for name in _NEEDED):
        return
    text, file = "{heterogeneous_layers_config_encoded_json:name}", "{heterogeneous_layers_config_path}"
    try:
        layers = described_layers(config) or ()
    except UserError as error:
        yield f"{file if encoded is None else text}: {literal_text(str(error))}"
        return
    named = text if path is None else file
    for name in _ALONE:
        if getattr(config, name, None):
            yield f"{{{name}}} does not go with {named}; leave it out"
    if getattr(config, "num_encoder_layers", None):
        yield f"{named}: not yet for a model with an encoder; leave it out"
    if config.norm_placement.startswith("parallel"):
        yield f"{{norm_placement}} does not go with {named}, whose layers may lack attention or MLP; pre works"
    for index, layer in enumerate(layers):
        for problem in _split_problems(config, layer):
            yield f"{named}: block_configs[{index}].{problem}"


_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "tensor_model_parallel_size")
_ALONE = (
    *("hybrid_layer_pattern", "num_moe_experts", "multi_latent_attention", "experimental_attention_variant"),
    *("mtp_num_layers", "use_mup"),
)
"""Fields that describe the layers in another way, or that need equal layers."""


def _split_problems(config: "TransformerConfig", layer: DescribedLayer) -> Iterator[str]:
    """Yields a problem unless tensor parallel ranks can divide the layer's query groups and the MLP's channels."""
    ranks, groups, width = config.tensor_model_parallel_size, layer.num_query_groups, layer.ffn_hidden_size
    if groups and groups % ranks and ranks % groups:
        yield f"attention: {{tensor_model_parallel_size}} and {groups} query groups: one has to divide the other"
    elif groups and groups < ranks and (config.fp8 or config.fp4):
        yield (
            f"attention: {{{'fp8' if config.fp8 else 'fp4'}}}: ranks that share a key and value head are not supported "
            "in it; "
            f"{{tensor_model_parallel_size:name}} {groups} or less works"
        )
    if width and width % ranks:
        yield f"ffn: {{tensor_model_parallel_size}} does not divide the {width} channels of the MLP"
