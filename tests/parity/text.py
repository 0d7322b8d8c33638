"""Text of the parity tests: a function of (model, step, sample), split over ranks without the product's code."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from parity.models import LENGTH, SEED, Model
from torch import Tensor

from megatron.core.tokens import RngPosition, SequencePart, Tokens

GLOBAL_BATCH = 8


@dataclass(frozen=True)
class TextBatch:
    """The part of a micro-batch that a context parallel rank holds."""

    ids: Tensor
    """int64 [b, s]. Labels have the same type and shape; the mask is float64."""
    labels: Tensor
    mask: Tensor
    tokens: Tokens


def micro_batch(
    model: Model, step: int, first: int, part: tuple[int, int] = (0, 1), rows: int | None = None
) -> TextBatch:
    """Returns the micro-batch that begins with sample `first` of the step's global batch.

    `part` is (rank, size) of context parallelism. Samples 1, 4 and 5 are masked completely, others in places or in one
    half, so some micro-batches, data parallel ranks and context parallel ranks have no token. In a masked step all
    samples are masked.
    """
    rows = rows or model.rows
    samples = [_sample(model, step, number) for number in range(first, first + rows)]
    ids, labels, mask = (torch.stack([sample[i] for sample in samples]) for i in range(3))
    ends = sorted({end + LENGTH * row for row, sample in enumerate(samples) for end in [*sample[3], LENGTH]})
    place = RngPosition(SEED, step, first)
    if not model.packed:
        index = zigzag(LENGTH, part)
        cut = [value[:, index] for value in (ids, labels, mask)]
        positions = index.expand(rows, -1) if model.told_positions else None
        tokens = Tokens(len(index), rows, _part(part), positions=positions, random=place)
        return TextBatch(*cut, tokens)
    index = zigzag(LENGTH * rows, part)
    cut = [value.reshape(1, -1)[:, index] for value in (ids, labels, mask)]
    starts = torch.tensor([0, *ends[:-1]])
    document = torch.bucketize(torch.arange(LENGTH * rows), torch.tensor(ends), right=True)
    positions = torch.arange(LENGTH * rows) - starts[document]
    tokens = Tokens(
        len(index),
        1,
        _part(part),
        positions=positions[None, index] if model.told_positions else None,
        cu_seqlens=torch.tensor([0, *ends], dtype=torch.int32),
        max_seqlen=max(end - start for start, end in zip([0, *ends], ends, strict=False)),
        sample_length=LENGTH,
        random=place,
    )
    return TextBatch(*cut, tokens)


def lengths_of_documents(model: Model, step: int) -> list[int]:
    """Returns the lengths of all documents of a step's global batch, in order."""
    return [end - start for *_, start, end in _documents(model, step)]


def documents(
    model: Model, step: int, numbers: Sequence[int], length: int, part: tuple[int, int], group: object = None
) -> TextBatch:
    """Returns these documents of a step's global batch end to end, padded to `length` tokens with a document without
    loss, as the ranks of `group` share them: `part` is (rank, size)."""
    every = _documents(model, step)
    rows, lengths = [], []
    for number in numbers:
        *row, start, end = every[number]
        rows.append([value[start:end] for value in row])
        lengths.append(end - start)
    if missing := length - sum(lengths):
        rows.append([torch.zeros(missing, dtype=value.dtype) for value in rows[0]])
        lengths.append(missing)
    index = zigzag(length, part)
    ids, labels, mask = (torch.cat(pieces)[None, index] for pieces in zip(*rows, strict=True))
    positions = torch.cat([torch.arange(count) for count in lengths])
    tokens = Tokens(
        len(index),
        1,
        SequencePart(*part, group) if part[1] > 1 else None,  # type: ignore[arg-type]
        positions=positions[None, index] if model.told_positions else None,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        max_seqlen=max(lengths),
        random=RngPosition(SEED, step),
    )
    return TextBatch(ids, labels, mask, tokens)


def _documents(model: Model, step: int) -> list[tuple[Tensor, Tensor, Tensor, int, int]]:
    """Returns inputs, labels and mask of the sample, start and end of each document of a step."""
    found = []
    for number in range(GLOBAL_BATCH):
        *row, ends = _sample(model, step, number)
        found += [(*row, start, end) for start, end in itertools.pairwise([0, *ends, LENGTH])]
    return found


def zigzag(length: int, part: tuple[int, int]) -> Tensor:
    """Returns the positions of a row's tokens on context parallel rank r of n: chunks r and 2 n - 1 - r of 2 n."""
    rank, size = part
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]]) if size > 1 else torch.arange(length)


def _part(part: tuple[int, int]) -> SequencePart | None:
    return SequencePart(*part) if part[1] > 1 else None


def _sample(model: Model, step: int, number: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Returns inputs, labels, mask and ends of documents (without the last) of one sample."""
    generator = torch.Generator().manual_seed(100 * step + number + 1)
    # Small ids are frequent, so that there is something to learn within a few steps.
    text = (torch.rand(LENGTH + 1, generator=generator) ** 2 * model.vocabulary).long()
    mask = (torch.rand(LENGTH, generator=generator) < 0.3 + 0.2 * (number % 4)).double()
    if number in (1, 4, 5) or step == model.masked_step:
        mask.zero_()
    elif number == 2:
        mask[: LENGTH // 2] = 0
    elif number == 6:
        mask[LENGTH // 4 : 3 * LENGTH // 4] = 0
    ends = (torch.randperm(LENGTH - 1, generator=generator)[:2] + 1).tolist() if model.packed else []
    return text[:-1], text[1:], mask, sorted(ends)
