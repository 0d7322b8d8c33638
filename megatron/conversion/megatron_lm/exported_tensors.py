"""The tensors of a checkpoint that an export to Megatron-LM holds, one in memory at a time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron.conversion.megatron_lm.mixer_rows import RowOrder, row_orders
from megatron.conversion.megatron_lm.names import ExportedNames, exported_shape
from megatron.core.dist_checkpointing.checkpoint import Checkpoint
from megatron.core.dist_checkpointing.checkpoint_selection import Log
from megatron.core.dist_checkpointing.chunk import (
    AVERAGE,
    MASTER,
    Chunk,
    is_optimizer_state,
    is_weight,
    optimizer_state_name,
)
from megatron.core.dist_checkpointing.planning import describe_names, match
from megatron.core.dist_checkpointing.reading import fill_tensors
from megatron.core.parameters import Box
from megatron.training.config.pretrain_config import PretrainConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ExportedTensors:
    """The weights of a checkpoint, and Adam's state, as an export holds them."""

    checkpoint: Checkpoint
    config: PretrainConfig
    is_local: bool
    """Whether Megatron-LM's own layers load the export, not those of Transformer Engine."""

    @cached_property
    def weights(self) -> list[str]:
        """Canonical names of the weights."""
        return [name for name in self.checkpoint.catalogue if is_weight(name)]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights by canonical name."""
        return {name: tuple(self.checkpoint.catalogue[name][0].chunk.global_shape) for name in self.weights}

    @cached_property
    def orders(self) -> dict[str, RowOrder]:
        """Orders of those weights whose rows have another one there."""
        return row_orders(self.shapes)

    @cached_property
    def names(self) -> ExportedNames:
        """Their names there."""
        is_hybrid = self.config.flat()["hybrid_layer_pattern"] is not None
        is_described = bool(self.config.transformer.heterogeneous_block_specs)
        return ExportedNames(self.weights, is_hybrid, self.is_local, is_described)

    def shape_of(self, weight: str) -> tuple[int, ...]:
        """Returns the shape of a weight there, with the rows that pad a vocabulary."""
        return exported_shape(weight, self.shapes[weight], self.config.flat()["make_vocab_size_divisible_by"])

    def has_adam(self, log: Log) -> bool:
        """Whether the checkpoint holds the state of Adam, and of no other optimizer. Lines say what is left behind."""
        catalogue = self.checkpoint.catalogue
        ours = {optimizer_state_name(kind, name) for kind in (MASTER, *MOMENTS, AVERAGE) for name in self.weights}
        if any(optimizer_state_name(AVERAGE, name) in catalogue for name in self.weights):
            log("left behind: the moving average of the weights (--ema-decay), for which its format has no place")
        other = [name for name in catalogue if is_optimizer_state(name) and name not in ours]
        if other:
            log(
                f"left behind, all optimizer state: only Adam's can be exported, and there is "
                f"{describe_names(other, 3)}; start Megatron-LM with --no-load-optim"
            )
            return False
        return any(map(self.has_moments, self.weights))

    def stored(self, kind: str) -> Iterator[tuple[str, str, torch.dtype]]:
        """Yields for each tensor of a kind of state ("" for weights): its weight, the name of what it is read from, and
        its type. A weight without a main weight is its own."""
        catalogue = self.checkpoint.catalogue
        for weight in self.weights:
            own = optimizer_state_name(kind, weight) if kind else weight
            if kind == MASTER:
                yield weight, own if own in catalogue else weight, torch.float32
            elif own in catalogue:
                yield weight, own, catalogue[own][0].chunk.dtype

    def has_moments(self, weight: str) -> bool:
        """Whether Adam's state of a weight is in the checkpoint."""
        return optimizer_state_name(MOMENTS[0], weight) in self.checkpoint.catalogue

    def read(self, weight: str, stored: str, dtype: torch.dtype) -> Tensor:
        """Returns a tensor of a weight, one-dimensional, with zeros for the rows that pad a vocabulary."""
        return _read(self.checkpoint, stored, self.shapes[weight], dtype, self.shape_of(weight))


def _read(checkpoint: Checkpoint, name: str, shape: Sequence[int], dtype: torch.dtype, theirs: Sequence[int]) -> Tensor:
    values = torch.zeros(math.prod(theirs), dtype=dtype)
    chunk = Chunk(name, tuple(shape), Box.whole(tuple(shape)), None, values[: math.prod(shape)])
    fill_tensors(checkpoint, match([chunk], {name: checkpoint.catalogue[name]}))
    return values
