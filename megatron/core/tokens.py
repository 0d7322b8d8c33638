"""The tokens of one micro-batch on one rank, as layers see them.

Inside the model activations are [t, h] with t = s * b, sequence-major: token (i, j) of sequence position i and row j is
at i * b + j. `Tokens` travels with them and says what those t tokens are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RngPosition:
    """Where these tokens stand in the run: what a dropout mask is a function of, beside the layer and the site."""

    seed: int
    iteration: Tensor | int
    """Training iteration: an int, or an int64 scalar on the device (so that a captured graph can advance it)."""
    first_sample: Tensor | int = 0
    """Place in the global batch of the first row of this micro-batch."""


@dataclass(frozen=True)
class SequencePart:
    """What one of several context parallel ranks holds of every row, in zig-zag: the row is cut into 2 * `size` chunks
    of equal length, and rank r has the chunks r and 2 * size - 1 - r. So all have the same work under a causal mask."""

    rank: int
    size: int

    def chunks(self, rank: int | None = None) -> tuple[int, int]:
        """Numbers of the two chunks of a rank (default: this one), ascending."""
        rank = self.rank if rank is None else rank
        return rank, 2 * self.size - 1 - rank


@dataclass(frozen=True)
class Tokens:
    """What the t = seq_length * batch_size tokens of a micro-batch are. A packed batch has batch_size 1.

    Under context parallelism (`part`) these are the tokens that this rank holds, in the order of its chunks: seq_length
    is the length of its part, while `cu_seqlens`, `max_seqlen` and `sample_length` speak of whole rows.
    Under sequence parallelism hidden states are a tensor parallel rank's slice of these tokens, as they lie in [t, h];
    the record is the same on all of them.
    """

    seq_length: int
    batch_size: int
    part: SequencePart | None = None
    """None: whole rows."""
    positions: Tensor | None = None
    """Position ids of the tokens held here, int64 [b, s]; None: where they stand in their row or packed document."""
    cu_seqlens: Tensor | None = None
    """Boundaries of packed documents, int32 [documents + 1], from 0 to t; None: every row is one document."""
    max_seqlen: int | None = None
    """Length of the longest packed document; given with `cu_seqlens`."""
    sample_length: int | None = None
    """Tokens of one sample, where a packed batch lays several samples end to end; None: `row_length`."""
    first_position: int = 0
    """Index in its row of the first token held here: not 0 while decoding with a cache."""
    random: RngPosition | None = None
    """None: no place in a run (evaluation, a bare call); dropout then asks torch's generator for a seed."""

    @property
    def count(self) -> int:
        return self.seq_length * self.batch_size

    @property
    def row_length(self) -> int:
        """Tokens of a whole row, all context parallel parts together."""
        return self.seq_length * (1 if self.part is None else self.part.size)


def row_index(tokens: Tokens, device: torch.device | str = "cpu", rank: int | None = None) -> Tensor:
    """Where in its row each token stands that is held here (or by context parallel rank `rank`): int64 [s]."""
    index = torch.arange(tokens.seq_length, device=device) + tokens.first_position
    if tokens.part is None:
        return index
    length = tokens.seq_length // 2
    first, second = tokens.part.chunks(rank)
    return torch.cat([index[:length] + first * length, index[:length] + second * length])


def position_ids(tokens: Tokens, device: torch.device | str = "cpu") -> Tensor:
    """Position of every token in its document, int64 [b, s]; [1, s] where all rows are alike."""
    if tokens.positions is not None:
        return tokens.positions
    index = row_index(tokens, device)  # [s]
    if tokens.cu_seqlens is None:
        return index[None]
    document = torch.bucketize(index, tokens.cu_seqlens[1:], right=True)
    return (index - tokens.cu_seqlens[document])[None]


def row_lengths(tokens: Tokens, device: torch.device | str = "cpu") -> Tensor:
    """How many tokens the row or packed document has that a token stands in, the parts of other ranks included: int64
    [1, s], or [1, 1] where all are alike."""
    if tokens.cu_seqlens is None:
        return torch.full((1, 1), tokens.first_position + tokens.row_length, device=device)
    document = torch.bucketize(row_index(tokens, device), tokens.cu_seqlens[1:], right=True)
    return tokens.cu_seqlens.diff().to(torch.int64)[document][None]
