"""Stacks of many layers, counted from a few: bytes grow linearly with the repetitions of a period of layers."""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron.core.transformer.layer_patterns import described_layer, has_rope, is_chunked, is_windowed, layer_parts
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.diagnosis.memory.chunk_bytes import ChunkBytes

_COUNTED = 2, 3
"""Repetitions of the period that are counted. From the first to the second, the growth is that of every further one."""


def layer_kind(config: TransformerConfig, number: int) -> Hashable:
    """Returns a key that is equal for layers (counted from 1 over the model) that take the same memory."""
    last = config.num_layers - config.num_layers_at_end_in_bf16
    in_bf16 = config.first_last_layers_bf16 and not config.num_layers_at_start_in_bf16 < number <= last
    patterns = is_windowed(config, number), is_chunked(config, number), has_rope(config, number)
    return layer_parts(config, number), described_layer(config, number), *patterns, in_bf16


@dataclass(frozen=True)
class Period:
    """How a sequence repeats: `before` entries, `repetitions` times a period of `length`, and its beginning again."""

    before: int
    length: int
    repetitions: int

    def of_length(self, entries: Sequence[Any], repetitions: int) -> list[Any]:
        """Returns the entries with another number of repetitions."""
        cut = (self.repetitions - repetitions) * self.length
        first = self.before + repetitions * self.length
        return [*entries[:first], *entries[first + cut :]]


def find_period(kinds: Sequence[Hashable], at_once: int = 1) -> Period | None:
    """Returns the period with which fewest entries have to be counted; None if that are all of them. Its length is a
    multiple of `at_once`, and so are the entries before it."""
    most, best = len(kinds), None
    for length in range(at_once, len(kinds) // (_COUNTED[1] + 1) + 1, at_once):
        before = _unlike(kinds, length)
        before = -(-before // at_once) * at_once
        repetitions, rest = divmod(len(kinds) - before, length)
        counted = before + _COUNTED[1] * length + rest
        if repetitions > _COUNTED[1] and counted < most:
            most, best = counted, Period(before, length, repetitions)
    return best


def _unlike(kinds: Sequence[Hashable], length: int) -> int:
    """Returns the number of entries before the part that repeats with a period of this length."""
    first = len(kinds) - length
    while first > 0 and kinds[first - 1] == kinds[first - 1 + length]:
        first -= 1
    return first


def count_repeated(chunk: nn.Module, config: TransformerConfig, count: Callable[[], ChunkBytes]) -> ChunkBytes:
    """Returns the result of `count`, which computes a micro-batch of the chunk, from counts with fewer layers."""
    blocks = [module for module in chunk.modules() if isinstance(module, TransformerBlock)]
    if len(blocks) != 1 or config.fine_grained_activation_offloading or config.cpu_offloading_num_layers:
        return count()
    (block,) = blocks
    recomputed = config.recompute_num_layers or 0 if config.recompute_method == "block" else 0
    kinds = [
        (layer_kind(config, layer.layer_number), place < recomputed)  # type: ignore[arg-type]
        for place, layer in enumerate(block.layers)
    ]
    period = find_period(kinds, block.layers_at_once)
    if period is None:
        return count()
    few, more = (_counted(block, period, repetitions, count) for repetitions in _COUNTED)
    further = period.repetitions - _COUNTED[0]
    grown = {
        field.name: getattr(few, field.name) + further * (getattr(more, field.name) - getattr(few, field.name))
        for field in dataclasses.fields(few)
    }
    return ChunkBytes(**grown)


def _counted(block: TransformerBlock, period: Period, repetitions: int, count: Callable[[], ChunkBytes]) -> ChunkBytes:
    with _with_layers(block, period.of_length(list(block.layers), repetitions)):
        return count()


@contextlib.contextmanager
def _with_layers(block: TransformerBlock, layers: Sequence[nn.Module]) -> Iterator[None]:
    whole, block.layers = block.layers, nn.ModuleList(layers)
    try:
        yield
    finally:
        block.layers = whole
