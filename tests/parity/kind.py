"""What the parity proof has to know of an architecture: how a model is built, what it reads, and its loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parity.models import Model
from torch import Tensor, nn

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Chunk:
    """Which part of a model a chunk is."""

    groups: ProcessGroupCollection | None = None
    pre_process: bool = True
    post_process: bool = True
    vp_stage: int | None = None


@dataclass(frozen=True)
class Kind:
    """One architecture."""

    build: Callable[[Model, TransformerConfig, Chunk], nn.Module]
    """Builds one chunk of a model."""
    micro_batch: Callable[[Model, int, int, tuple[int, int], int | None], Any]
    """(model, step, first sample, part (rank, size) of a context parallel rank, rows or None) -> a micro-batch: a
    dataclass of tensors, with its `Tokens`. A function of its arguments alone."""
    forward: Callable[..., Any]
    """(chunk, micro-batch, further keywords of the model's forward) -> the chunk's output."""
    loss: Callable[[Any, Any], tuple[Any, ...]]
    """(output, micro-batch) -> what a loss function returns: (sum, tokens, report) or (mean, report). The report is
    [sum, count], of which the sum is compared up to rounding and the count to the bit."""
    count: Callable[[Any], Tensor]
    """Tokens of a micro-batch that the loss counts."""
    shapes: Callable[[Model, int], dict[str, int]]
    """(model, rows of a micro-batch) -> the lengths and sizes that the pipeline schedules are told."""
