"""In which layers something holds that a config says by layer: a period, or a list with an entry for each."""

from typing import Any

from megatron.core.exceptions import UserError


def layer_flags(name: str, pattern: list[int], config: Any) -> list[int]:
    """A list with one 0 or 1 for each layer, checked."""
    if len(pattern) != config.num_layers:
        raise UserError(f"{name} has {len(pattern)} entries for {config.num_layers} layers (num_layers)")
    return pattern


def as_decoder_layer(config: Any, layer_number: int) -> int:
    """The number of the decoder's layer that a layer is like: layers that predict tokens further ahead are numbered
    after the decoder's last, and are as that in every pattern."""
    return min(layer_number, config.num_layers)


def is_windowed(config: Any, layer_number: int) -> bool:
    """Whether `window_size` holds in a layer (counted from 1): in all, or as `window_attn_skip_freq` says: not in every
    N-th, or where a list has a 1."""
    return config.window_size is not None and _holds(config, layer_number, "window_attn_skip_freq")


def is_chunked(config: Any, layer_number: int) -> bool:
    """Whether `attention_chunk_size` holds in a layer (counted from 1), by `attention_chunk_skip_freq` as `is_windowed`
    by its pattern."""
    return config.attention_chunk_size is not None and _holds(config, layer_number, "attention_chunk_skip_freq")


def has_rope(config: Any, layer_number: int) -> bool:
    """Whether rotary positions hold in a layer (counted from 1), by `no_rope_freq`: not in every N-th, or not where a
    list has a 1."""
    return _holds(config, layer_number, "no_rope_freq", entry=0)


def _holds(config: Any, layer_number: int, name: str, entry: int = 1) -> bool:
    """By the pattern of that name. None: in all layers; N: not in every N-th; a list: where it has this entry."""
    pattern = getattr(config, name)
    if pattern is None:
        return True
    layer_number = as_decoder_layer(config, layer_number)
    if isinstance(pattern, int):
        return layer_number % pattern != 0
    return bool(layer_flags(name, pattern, config)[layer_number - 1]) == bool(entry)


def has_experts(config: Any, layer_number: int) -> bool:
    """Whether a layer (counted from 1) has experts in place of one MLP, by `moe_layer_freq`: the first and every N-th
    from there, or where a list has a 1."""
    if config.num_moe_experts is None:
        return False
    layer_number = as_decoder_layer(config, layer_number)
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        return (layer_number - 1) % pattern == 0
    return bool(layer_flags("moe_layer_freq", pattern, config)[layer_number - 1])
