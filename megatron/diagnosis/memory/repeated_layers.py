"""Stacks of many layers, counted from a few: layers of one kind take the same bytes."""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence

from torch import nn

from megatron.core.transformer.layer_patterns import described_layer, has_rope, is_chunked, is_windowed, layer_parts
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.diagnosis.memory.chunk_bytes import ChunkBytes, CountedChunk, only_block


def layer_kind(config: TransformerConfig, number: int) -> Hashable:
    """Returns a key that is equal for layers (counted from 1 over the model) that take the same memory."""
    last = config.num_layers - config.num_layers_at_end_in_bf16
    in_bf16 = config.first_last_layers_bf16 and not config.num_layers_at_start_in_bf16 < number <= last
    patterns = is_windowed(config, number), is_chunked(config, number), has_rope(config, number)
    return layer_parts(config, number), described_layer(config, number), *patterns, in_bf16


def chosen_units(kinds: Sequence[Hashable]) -> list[int]:
    """Returns the places of the first and the last two of each kind. A peak is in one of them: others of their kind
    have fewer bytes before them."""
    places: dict[Hashable, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    return sorted({place for found in places.values() for place in (found[0], *found[-2:])})


def count_repeated(chunk: nn.Module, config: TransformerConfig, count: Callable[[], CountedChunk]) -> ChunkBytes:
    """Returns the bytes of a micro-batch of the chunk. `count` computes one, here with few layers of each kind."""
    block = only_block(chunk)
    if block is None or config.fine_grained_activation_offloading or config.cpu_offloading_num_layers:
        return count().total
    step, layers = block.layers_at_once, list(block.layers)
    units = [layers[first : first + step] for first in range(0, len(layers), step)]
    recomputed = config.recompute_num_layers or 0 if config.recompute_method == "block" else 0
    kinds = [  # all those that are recomputed by their place stay
        (place if place < recomputed else None, *(layer_kind(config, layer.layer_number) for layer in unit))  # type: ignore[arg-type]
        for place, unit in enumerate(units)
    ]
    chosen = chosen_units(kinds)
    with _with_layers(block, [layer for place in chosen for layer in units[place]]):
        counted = count()
    if len(chosen) == len(units):
        return counted.total
    return _with_all(counted, kinds, chosen) if len(counted.backward) > len(chosen) else count().total  # frozen ones


def _with_all(counted: CountedChunk, kinds: Sequence[Hashable], chosen: Sequence[int]) -> ChunkBytes:
    """Returns the bytes with units of all these kinds from a count with the chosen ones."""
    total, forward, backward = counted.total, counted.forward, counted.backward[::-1]
    kept: dict[Hashable, int] = {}
    deferred: dict[Hashable, int] = {}
    for index, place in enumerate(chosen[:-1]):
        kept[kinds[place]] = forward[index + 1].live - forward[index].live
        further = kept[kinds[place]] + backward[index + 1].live - backward[index + 2].live
        deferred[kinds[place]] = further if counted.defers else 0
    left_out = sorted(set(range(len(kinds))) - set(chosen))
    before = [0, *(sum(kept[kinds[place]] for place in left_out if place < other) for other in chosen)]
    behind = [sum(deferred[kinds[place]] for place in left_out if place > other) for other in (-1, *chosen)]
    return dataclasses.replace(
        total,
        forward_peak=max(span.peak + more for span, more in zip(forward, before, strict=True)),
        kept=total.kept + before[-1],
        backward_peak=max(span.peak + more + later for span, more, later in zip(backward, before, behind, strict=True)),
        deferred=total.deferred + behind[0],
        deferred_peak=total.deferred_peak + behind[0],
    )


@contextlib.contextmanager
def _with_layers(block: TransformerBlock, layers: Sequence[nn.Module]) -> Iterator[None]:
    whole, block.layers = block.layers, nn.ModuleList(layers)
    try:
        yield
    finally:
        block.layers = whole
