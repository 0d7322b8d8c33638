"""What a cell leaves behind for its judge: plain numbers, which say whose part of what they are."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.chunk import Chunk
from megatron.core.ops.dropout.dropout import Draw
from megatron.core.parameters import Box
from megatron.core.transformer.layer_metrics import LayerMetric, take_layer_metrics


@dataclass
class Piece:
    """Elements [begin, end) of a box of a canonical tensor, on one rank."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    begin: int
    end: int
    values: Tensor
    """One-dimensional, on the CPU."""

    @property
    def place(self) -> tuple[Any, ...]:
        """What it is a part of: equal for replicas."""
        return self.name, self.box, self.begin, self.end

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of a whole canonical tensor, one-dimensional."""
        cut = tuple(slice(b, b + n) for b, n in zip(self.box.start, self.box.shape, strict=True))
        return whole.view(self.global_shape)[cut].reshape(-1)[self.begin : self.end]


def pieces(chunks: Iterable[Chunk]) -> list[Piece]:
    """Copies of some chunks' values."""
    return [Piece(c.name, c.global_shape, c.box, *c.range, c.flat.detach().cpu().clone()) for c in chunks]


def reports_of(chunks: Iterable[nn.Module]) -> list[LayerMetric]:
    """What some chunks' layers have reported since the last call."""
    return [LayerMetric(r.name, r.layer, r.total.cpu(), r.count.cpu()) for r in take_layer_metrics(chunks)]


Identity = tuple[tuple[int, int], int, int, int]
"""Of a row of a dropout mask: key (seed, layer, site), iteration, token, and head (or what stands in its place)."""


@dataclass
class Masks:
    """Rows of dropout masks as they were drawn: bits by identity, with the index of the first."""

    rows: dict[Identity, list[tuple[int, bytes]]] = field(default_factory=dict)

    def watch(self, keep_rows: Any) -> Any:
        """The function, telling this record of what it gives."""

        def watched(draw: Draw, row: Tensor, extra: Tensor, first: Tensor, count: int) -> Tensor:
            kept: Tensor = keep_rows(draw, row, extra, first, count)
            bits = kept.cpu().numpy()
            starts = first.tolist()
            for i, (token, other) in enumerate(zip(row.tolist(), extra.tolist(), strict=True)):
                identity = (draw.key, int(draw.iteration), token, other)
                drawn = (starts[i], bits[i].tobytes())
                known = self.rows.setdefault(identity, [])
                if drawn not in known:
                    known.append(drawn)
            return kept

        return watched


@contextmanager
def watched_masks(chunks: Sequence[Any], masks: Masks) -> Iterator[None]:
    """Dropout masks that are drawn within are noted."""
    before = [chunk.backend for chunk in chunks]
    for chunk in chunks:
        chunk.backend = dataclasses.replace(chunk.backend, keep_rows=masks.watch(chunk.backend.keep_rows))
    yield
    for chunk, backend in zip(chunks, before, strict=True):
        chunk.backend = backend


@dataclass
class Step:
    """One training step, as one rank knows it."""

    losses: dict[int, Tensor]
    """By number of the micro-batch's first sample: [sum, tokens] of this rank's part; empty where no loss is known."""
    gradients: list[Piece]
    norm: float
    reports: list[LayerMetric] = field(default_factory=list)
    """What layers report beside the loss: this rank's parts of totals and counts, on the CPU."""


@dataclass
class Evidence:
    """All that one rank of a cell saw. The single process of the reference leaves the same."""

    initial: list[Piece]
    steps: list[Step] = field(default_factory=list)
    weights: list[Piece] = field(default_factory=list)
    """After the last step."""
    masks: Masks = field(default_factory=Masks)
    """Of the first step."""
    norm_of_ones: float = 0.0
    context: int = 0
    """Place among context parallel ranks: losses of one micro-batch are summed over them."""

    @property
    def is_finite(self) -> bool:
        return all(bool(p.values.isfinite().all()) for s in self.steps for p in [*s.gradients, *self.weights])


def relative(difference: Tensor, reference: Tensor) -> float:
    """|d| / |ref|; without a reference there must be no difference either."""
    size = float(torch.linalg.vector_norm(reference.double()))
    distance = float(torch.linalg.vector_norm(difference.double()))
    return distance / size if size > 0 else (0.0 if distance == 0 else float("inf"))
