"""What stands behind each token in its row: for layers that predict tokens further ahead than the next."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.collectives import Group, gather_rows
from megatron.core.context_parallel.splitting import in_natural_order
from megatron.core.tokens import Tokens, row_index


def rows_ahead(rows: Sequence[Tensor], depths: int, tokens: Tokens, group: Group = None) -> list[list[Tensor]]:
    """Rows of numbers [b, s], one for each token: for each depth d from 1 to `depths` the same rows with the numbers
    of the tokens d places on, and 0 where the row or the packed document ends before.

    Integers up to 64 bits, or floats up to 64. Under context parallelism a row goes on with other ranks: each shows
    the others the first numbers of its chunks, of all rows in one exchange over `group`.
    """
    chunks = 1 if tokens.part is None else 2
    packed = torch.stack([_as_words(row) for row in rows]).unflatten(-1, (chunks, -1))  # [rows, b, chunks, c]
    longer = torch.cat([packed, _what_follows(packed, depths, tokens, group)], -1)  # [rows, b, chunks, c + depths]
    length, last = packed.shape[-1], _places_left(tokens, packed.device)
    ahead = []
    for depth in range(1, depths + 1):
        shifted = longer[..., depth : depth + length].flatten(-2)  # [rows, b, s]
        shifted = torch.where(last >= depth, shifted, 0)
        ahead.append([_from_words(words, row.dtype) for words, row in zip(shifted, rows, strict=True)])
    return ahead


def _what_follows(packed: Tensor, count: int, tokens: Tokens, group: Group) -> Tensor:
    """The first `count` numbers behind each chunk of this rank, [rows, b, chunks, count]; 0 behind the last."""
    if tokens.part is None:
        return packed.new_zeros(*packed.shape[:-1], count)
    shown = min(count, packed.shape[-1])
    heads = packed[..., :shown].permute(2, 0, 1, 3)  # [2, rows, b, shown]
    heads = in_natural_order(gather_rows(heads, group), tokens.part.size)  # [2 * ranks, rows, b, shown]
    nothing = heads.new_zeros(-(-count // shown), *heads.shape[1:])
    heads = torch.cat([heads, nothing])
    following = [
        torch.cat(list(heads[number + 1 : number + 1 + len(nothing)]), -1)[..., :count]
        for number in tokens.part.chunks()
    ]
    return torch.stack(following, 2)


def _places_left(tokens: Tokens, device: torch.device) -> Tensor:
    """How many tokens stand behind each in its row or packed document: int64 [s]."""
    index = row_index(tokens, device)
    if tokens.cu_seqlens is None:
        return tokens.row_length - 1 - index
    ends = tokens.cu_seqlens[1:].to(torch.int64)
    return ends[torch.bucketize(index, ends, right=True)] - 1 - index


def _as_words(row: Tensor) -> Tensor:
    """Numbers as int64, from which they can be had back as they were."""
    return row.double().view(torch.int64) if row.is_floating_point() else row.to(torch.int64)


def _from_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    return words.view(torch.float64).to(dtype) if dtype.is_floating_point else words.to(dtype)
