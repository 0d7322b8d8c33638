"""The tokens that a rank routes, among those of the whole micro-batch, which several ranks may share."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.collectives import Group, gather_rows, group_rank, group_size
from megatron.core.context_parallel import sequence_part
from megatron.core.ops.dropout.dropout import DropoutRngPosition, dropout_tokens
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokens import RngPosition, Tokens, row_index


@dataclass(frozen=True)
class MicroBatchShare:
    """This rank's tokens of a micro-batch. Everything that couples tokens couples those of all its ranks."""

    tokens: Tokens
    """Those of this context parallel rank."""
    count: int
    """Tokens that this rank routes."""
    group: Group
    """Ranks that share the micro-batch's tokens, each with `count` of its own."""
    sequence_group: Group
    """Those among which the tokens of a context parallel rank are cut, as they lie; None: each has all of them."""

    @property
    def ranks(self) -> int:
        """Of the group."""
        return group_size(self.group)

    @property
    def total(self) -> int:
        """Tokens of the whole micro-batch."""
        return self.count * self.ranks

    @property
    def sample_length(self) -> int:
        """Tokens of a sample: of a row, or of one of the samples that a packed row lays end to end."""
        return self.tokens.sample_length or self.tokens.row_length

    @property
    def samples(self) -> int:
        """Samples of the whole micro-batch."""
        return self.total // self.sample_length

    def sample_numbers(self, device: torch.device) -> Tensor:
        """Which of the micro-batch's samples each of this rank's tokens belongs to: int64 [t]."""
        position, row = self._places(device)
        return self.cut((position + row * self.tokens.row_length) // self.sample_length)

    def order(self, device: torch.device) -> Tensor | None:
        """Place of each of this rank's tokens in the micro-batch as it lies on a rank that holds all of it, sequence-
        major: int64 [t]. None where this rank does."""
        if self.ranks == 1:
            return None
        position, row = self._places(device)
        return self.cut(position * self.tokens.batch_size + row)

    def gather(self, rows: Tensor) -> Tensor:
        """[t, ...] of each rank -> [total, ...], by rank."""
        return gather_rows(rows, self.group)

    def own(self, rows: Tensor) -> Tensor:
        """[total, ...], by rank -> this rank's [t, ...]."""
        return rows.narrow(0, group_rank(self.group) * self.count, self.count)

    def cut(self, index: Tensor) -> Tensor:
        """Of something about each token of this context parallel rank, what is about those that this rank routes."""
        return index.flatten().chunk(group_size(self.sequence_group))[group_rank(self.sequence_group)]

    def place(self, seed: int, layer: int, site: str, device: torch.device) -> DropoutRngPosition:
        """Where noise of this rank's tokens stands in the run. Without a place in a run it is that of the first
        iteration under `seed`: the same on every rank, and in a layer that is computed again."""
        tokens = dataclasses.replace(self.tokens, random=self.tokens.random or RngPosition(seed, 0))
        numbers = dropout_tokens(tokens, device)
        return DropoutRngPosition(dataclasses.replace(numbers, index=self.cut(numbers.index)), layer, site)

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        position = row_index(self.tokens, device)[:, None]  # [s, 1]
        return position, torch.arange(self.tokens.batch_size, device=device)


def share_of(tokens: Tokens, count: int, groups: ProcessGroupCollection, sequence_parallel: bool) -> MicroBatchShare:
    """The share of a rank that routes `count` of the `tokens` of its context parallel rank: its part of them with
    `sequence_parallel`, else all."""
    parts, group = sequence_parallel and groups.size("tp") > 1, None
    if parts or groups.size("cp") > 1:
        group = groups.tp_cp if parts else groups.cp
    return MicroBatchShare(tokens, count, group, groups.tp if parts else None)


def share_of_rows(s: int, b: int, groups: ProcessGroupCollection, sequence_parallel: bool) -> MicroBatchShare:
    """The same of `whole_rows`."""
    return share_of(whole_rows(s, b, groups, sequence_parallel), s * b, groups, sequence_parallel)


def whole_rows(s: int, b: int, groups: ProcessGroupCollection, sequence_parallel: bool) -> Tokens:
    """The tokens of a context parallel rank where nothing is known but that this rank has [s, b] of whole rows."""
    return Tokens(s * (groups.size("tp") if sequence_parallel else 1), b, sequence_part(groups))
