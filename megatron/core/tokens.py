"""Tokens: the shape, positions and document boundaries of the tokens of one micro-batch on one rank.

Inside the model, activations are [t, h] with t = s * b, sequence-major: the token at sequence position i of row j has
index i * b + j. A `Tokens` record describes these t tokens, and is passed along with the activations.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core.communication.collectives import Group


@dataclass(frozen=True)
class RngPosition:
    """The position of a micro-batch in the run. A dropout mask is a function of it, of the layer and of the site in the
    layer."""

    seed: int
    iteration: Tensor | int
    """Training iteration: an int, or an int64 scalar on the device (so that a captured graph can advance it)."""
    first_sample: Tensor | int = 0
    """Index in the global batch of the first row of this micro-batch."""


@dataclass(frozen=True)
class SequencePart:
    """The part of every row on one context parallel rank. A row is cut into 2 * `size` chunks of equal length, and rank
    r has the chunks r and 2 * size - 1 - r (zig-zag), so that all ranks have equal work under a causal mask."""

    rank: int
    size: int
    group: Group = field(default=None, compare=False)
    """With dynamic context parallelism, the ranks that share the rows of this micro-batch; None: the model's context
    parallel group."""

    def chunks(self, rank: int | None = None) -> tuple[int, int]:
        """Returns the indices of the two chunks of a rank (default: this one), ascending."""
        rank = self.rank if rank is None else rank
        return rank, 2 * self.size - 1 - rank


@dataclass(frozen=True)
class Tokens:
    """Describes the t = seq_length * batch_size tokens of a micro-batch. A packed batch has batch_size 1.

    Under context parallelism (`part`) these are the tokens of this rank, in the order of its chunks: `seq_length` is
    the length of its part, while `cu_seqlens`, `max_seqlen` and `sample_length` describe whole rows. Under sequence
    parallelism, hidden states are each tensor parallel rank's slice of [t, h]; the record describes all t tokens and is
    equal on these ranks.
    """

    seq_length: int
    batch_size: int
    part: SequencePart | None = None
    """None: whole rows."""
    positions: Tensor | None = None
    """Position ids of this rank's tokens, int64 [b, s]; None: their positions in their row or packed document."""
    cu_seqlens: Tensor | None = None
    """Boundaries of packed documents, int32 [documents + 1], from 0 to t; None: every row is one document."""
    max_seqlen: int | None = None
    """Length of the longest packed document; given with `cu_seqlens`."""
    sample_length: int | None = None
    """Tokens of one sample, if a packed batch concatenates several samples; None: `row_length`."""
    first_position: int = 0
    """Index in its row of the first token: not 0 while decoding with a cache."""
    random: RngPosition | None = None
    """Position in the run. None (evaluation, a direct call): dropout takes its seed from torch's generator."""

    @property
    def count(self) -> int:
        """Number of tokens t."""
        return self.seq_length * self.batch_size

    @property
    def row_length(self) -> int:
        """Number of tokens of a whole row, over all context parallel ranks."""
        return self.seq_length * (1 if self.part is None else self.part.size)


def row_index(tokens: Tokens, device: torch.device | str = "cpu", rank: int | None = None) -> Tensor:
    """Returns the index in its row of each token of this rank (or of context parallel rank `rank`): int64 [s]."""
    index = torch.arange(tokens.seq_length, device=device) + tokens.first_position
    if tokens.part is None:
        return index
    length = tokens.seq_length // 2
    first, second = tokens.part.chunks(rank)
    return torch.cat([index[:length] + first * length, index[:length] + second * length])


def position_ids(tokens: Tokens, device: torch.device | str = "cpu") -> Tensor:
    """Returns the position of every token in its document: int64 [b, s], or [1, s] if all rows are alike."""
    if tokens.positions is not None:
        return tokens.positions
    index, document = row_index(tokens, device), document_numbers(tokens, device)
    if tokens.cu_seqlens is None or document is None:
        return index[None]
    return (index - tokens.cu_seqlens[document])[None]


def document_numbers(tokens: Tokens, device: torch.device | str = "cpu") -> Tensor | None:
    """Returns for each token the number of its packed document, int64 [s], ascending; None if every row is one
    document."""
    if tokens.cu_seqlens is None:
        return None
    return torch.bucketize(row_index(tokens, device), tokens.cu_seqlens[1:], right=True)


def row_lengths(tokens: Tokens, device: torch.device | str = "cpu") -> Tensor:
    """Returns, for every token, the length of its row or packed document, including the parts of other ranks: int64 [1,
    s], or [1, 1] if all are equal."""
    document = document_numbers(tokens, device)
    if tokens.cu_seqlens is None or document is None:
        return torch.full((1, 1), tokens.first_position + tokens.row_length, device=device)
    return tokens.cu_seqlens.diff().to(torch.int64)[document][None]
