"""Shifts rows of tokens to the left, for layers that predict tokens further ahead (multi-token prediction)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.communication.collectives import Group, gather_rows
from megatron.core.context_parallel.splitting import in_natural_order
from megatron.core.tokens import Tokens, row_index


def shifted_rows(rows: Sequence[Tensor], depths: int, tokens: Tokens, group: Group = None) -> list[list[Tensor]]:
    """Returns, for each depth d from 1 to `depths`, the rows [b, s] shifted by d tokens.

    Entries beyond the end of the row, or of the packed document, are 0. Rows hold integers or floats of up to 64 bits.
    Under context parallelism a row continues on other ranks: the ranks gather the first entries of all chunks of all
    rows in one collective over `group`, or over the group of `tokens.part`.
    """
    chunks = 1 if tokens.part is None else 2
    packed = torch.stack([_as_words(row) for row in rows]).unflatten(-1, (chunks, -1))  # [rows, b, chunks, c]
    longer = torch.cat([packed, _following_entries(packed, depths, tokens, group)], -1)  # [rows, b, chunks, c + depths]
    length, last = packed.shape[-1], _tokens_left(tokens, packed.device)
    ahead = []
    for depth in range(1, depths + 1):
        shifted = longer[..., depth : depth + length].flatten(-2)  # [rows, b, s]
        shifted = torch.where(last >= depth, shifted, 0)
        ahead.append([_from_words(words, row.dtype) for words, row in zip(shifted, rows, strict=True)])
    return ahead


def _following_entries(packed: Tensor, count: int, tokens: Tokens, group: Group) -> Tensor:
    """Returns the `count` entries that follow each chunk of this rank, [rows, b, chunks, count]; 0 after the last."""
    if tokens.part is None:
        return packed.new_zeros(*packed.shape[:-1], count)
    shown = min(count, packed.shape[-1])
    heads = packed[..., :shown].permute(2, 0, 1, 3)  # [2, rows, b, shown]
    heads = in_natural_order(
        gather_rows(heads, tokens.part.group or group), tokens.part.size
    )  # [2 * ranks, rows, b, shown]
    nothing = heads.new_zeros(-(-count // shown), *heads.shape[1:])
    heads = torch.cat([heads, nothing])
    following = [
        torch.cat(list(heads[number + 1 : number + 1 + len(nothing)]), -1)[..., :count]
        for number in tokens.part.chunks()
    ]
    return torch.stack(following, 2)


def _tokens_left(tokens: Tokens, device: torch.device) -> Tensor:
    """Returns the number of tokens after each token in its row or packed document: int64 [s]."""
    index = row_index(tokens, device)
    if tokens.cu_seqlens is None:
        return tokens.row_length - 1 - index
    ends = tokens.cu_seqlens[1:].to(torch.int64)
    return ends[torch.bucketize(index, ends, right=True)] - 1 - index


def _as_words(row: Tensor) -> Tensor:
    """Returns the numbers as int64 words, without loss."""
    return row.double().view(torch.int64) if row.is_floating_point() else row.to(torch.int64)


def _from_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    return words.view(torch.float64).to(dtype) if dtype.is_floating_point else words.to(dtype)
