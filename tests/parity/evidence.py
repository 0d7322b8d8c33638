"""Records of a run that `compare` checks: losses, gradients, weights and dropout masks, each with its canonical name
and position."""

import math
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
class TensorSlice:
    """Elements [begin, end) of a box of a canonical tensor, as one rank holds them."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    begin: int
    end: int
    values: Tensor
    """One-dimensional, on the CPU."""

    @property
    def place(self) -> tuple[Any, ...]:
        """Identifies the elements: name, box and range. Replicas have equal places."""
        return self.name, self.box, self.begin, self.end

    def of(self, whole: Tensor) -> Tensor:
        """Returns these elements of the whole canonical tensor, one-dimensional."""
        cut = tuple(slice(b, b + n) for b, n in zip(self.box.start, self.box.shape, strict=True))
        return whole.view(self.global_shape)[cut].reshape(-1)[self.begin : self.end]


def slices(chunks: Iterable[Chunk]) -> list[TensorSlice]:
    """Copies the values of checkpoint chunks to the CPU."""
    return [TensorSlice(c.name, c.global_shape, c.box, *c.range, c.flat.detach().cpu().clone()) for c in chunks]


def reports_of(chunks: Iterable[nn.Module]) -> list[LayerMetric]:
    """Returns what the layers of model chunks reported since the last call, on the CPU."""
    return [LayerMetric(r.name, r.layer, r.total.cpu(), r.count.cpu()) for r in take_layer_metrics(chunks)]


Identity = tuple[tuple[int, int], int, int, int]
"""Identifies a row of a dropout mask: (key, iteration, token, extra index). The key is derived from seed, layer and
site; the extra index is the head in attention."""


@dataclass
class Masks:
    """Rows of dropout masks that were drawn: for each identity a list of (index of the first column, bits)."""

    rows: dict[Identity, list[tuple[int, bytes]]] = field(default_factory=dict)

    def watch(self, keep_rows: Any) -> Any:
        """Wraps `keep_rows` so that every row it returns is added to this record."""

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
    """Records in `masks` all dropout masks that the chunks draw inside this context."""
    before = [chunk.backend for chunk in chunks]
    for chunk in chunks:
        watched = masks.watch(chunk.backend.dropout.keep_rows)
        chunk.backend = chunk.backend.with_operations(dropout={"keep_rows": watched})
    yield
    for chunk, backend in zip(chunks, before, strict=True):
        chunk.backend = backend


@dataclass
class Step:
    """Results of one training step on one rank."""

    losses: dict[int, Tensor]
    """[sum, tokens] of this rank's part of each micro-batch, by the number of its first sample. Empty on ranks without
    the last stage."""
    gradients: list[TensorSlice]
    norm: float
    reports: list[LayerMetric] = field(default_factory=list)
    """Values that layers report (such as auxiliary losses): this rank's parts of totals and counts, on the CPU."""


@dataclass
class Evidence:
    """Everything that one rank of a cell recorded. The single process of the reference records the same."""

    initial: list[TensorSlice]
    steps: list[Step] = field(default_factory=list)
    weights: list[TensorSlice] = field(default_factory=list)
    """After the last step."""
    masks: Masks = field(default_factory=Masks)
    """Dropout masks of the first step."""
    norm_of_ones: float = 0.0
    """Gradient norm when every gradient element is one."""
    context: int = 0
    """Context parallel rank. The losses of one micro-batch are summed over these ranks."""
    further: list[Step] = field(default_factory=list)
    """Steps after `weights` were recorded, without gradients."""

    @property
    def is_finite(self) -> bool:
        """Whether all gradients, weights and norms are finite."""
        tensors = [p.values for p in self.weights] + [p.values for s in self.steps for p in s.gradients]
        norms = [step.norm for step in [*self.steps, *self.further]]
        return all(bool(values.isfinite().all()) for values in tensors) and all(map(math.isfinite, norms))


def relative(difference: Tensor, reference: Tensor) -> float:
    """Returns |difference| / |reference|. For a reference of zeros: 0 if the difference is zero too, else infinity."""
    size = float(torch.linalg.vector_norm(reference.double()))
    distance = float(torch.linalg.vector_norm(difference.double()))
    return distance / size if size > 0 else (0.0 if distance == 0 else float("inf"))
