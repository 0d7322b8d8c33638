"""All-to-all between all heads of a part of each row and some heads of whole rows (Jacobs et al. 2023, "DeepSpeed
Ulysses").

Operations between the start of an exchange and its `wait` overlap with it, in forward and in backward.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.communication.async_collective import AsyncCollective, all_to_all_route
from megatron.core.communication.collectives import Group, gather_rows
from megatron.core.context_parallel.splitting import in_natural_order, in_rank_order


def share_keys(key: Tensor, heads: int, ranks: int) -> Tensor:
    """Returns keys [s, b, g, d] with repeated heads, so that each rank's equal share of key heads contains exactly the
    keys of its equal share of the `heads` query heads. Nothing is repeated if the ranks divide the key heads."""
    pack = heads // key.shape[2]  # query heads that share a key head
    kept_together = math.gcd(heads // ranks, pack)
    return key if kept_together == pack else key.repeat_interleave(pack // kept_together, dim=2)


def in_pieces(heads: Tensor, ranks: int, count: int) -> list[Tensor]:
    """Splits heads [s, b, n, d] into `count` tensors [s, b, n / count, d], each with an equal share for each rank."""
    pieces = heads.unflatten(2, (ranks, count, -1)).unbind(3)  # [s, b, ranks, n / (ranks * count), d] each
    return [piece.flatten(2, 3) for piece in pieces]


def from_pieces(pieces: Sequence[Tensor], ranks: int) -> Tensor:
    """Computes the inverse of `in_pieces`."""
    return torch.stack([piece.unflatten(2, (ranks, -1)) for piece in pieces], 3).flatten(2, 4)


@dataclass(frozen=True)
class PendingHeads:
    """Heads of whole rows that are being sent to this rank."""

    rows: AsyncCollective
    shapes: list[tuple[int, int, int]]
    """Shape of each tensor without its rows: [b, n, d]."""
    ranks: int

    def wait(self) -> list[Tensor]:
        """Returns each tensor [ranks * s, b, n, d], rows in the order of the row."""
        rows = in_natural_order(self.rows.finish()[0], self.ranks)
        if rows.dim() == 4:  # equally many heads each: all channels of a head lie together
            return list(rows.split([shape[-1] for shape in self.shapes], -1))
        parts = rows.split([math.prod(shape) for shape in self.shapes], 1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self.shapes, strict=True)]


def start_to_heads(tensors: Sequence[Tensor], group: Group, ranks: int) -> PendingHeads:
    """Starts to exchange each tensor [s, b, ranks * n, d] for [ranks * s, b, n, d], all as one message."""
    pieces = [tensor.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4) for tensor in tensors]
    shapes = [(tensor.shape[1], tensor.shape[2] // ranks, tensor.shape[3]) for tensor in tensors]
    if len({heads for _, heads, _ in shapes}) == 1:
        message = torch.cat(pieces, -1)  # one copy: views are read as they lie
    else:
        message = torch.cat([piece.flatten(2) for piece in pieces], 2)
    return PendingHeads(_all_to_all(message.flatten(0, 1), group), shapes, ranks)


@dataclass(frozen=True)
class PendingReturn:
    """All heads of this rank's part of the rows, being sent back."""

    rows: AsyncCollective
    ranks: int

    def wait(self) -> Tensor:
        """Returns [s, b, ranks * n, d]."""
        received = self.rows.finish()[0].unflatten(0, (self.ranks, -1))  # [ranks, s, b, n, d]
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def start_to_rows(heads: Tensor, group: Group, ranks: int) -> PendingReturn:
    """Starts to send heads [ranks * s, b, n, d] back to the ranks of their rows."""
    return PendingReturn(_all_to_all(in_rank_order(heads, ranks), group), ranks)


def whole_rows_of(mask: Tensor, group: Group, ranks: int) -> Tensor:
    """Gathers a mask [.., .., s, keys] of this rank's queries into one for the queries of the group, in row order."""
    rows = mask.permute(2, 0, 1, 3).contiguous()
    return in_natural_order(gather_rows(rows.to(torch.uint8), group), ranks).permute(1, 2, 0, 3).bool()


def _all_to_all(rows: Tensor, group: Group) -> AsyncCollective:
    return AsyncCollective(all_to_all_route(group), None, rows)
