"""The tokens that one rank routes when several ranks share a micro-batch."""

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.communication.collectives import Group, all_reduce, gather_rows, group_rank, group_size
from megatron.core.context_parallel import sequence_part
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.ops.dropout.dropout import DropoutRngPosition, dropout_tokens
from megatron.core.tokens import RngPosition, Tokens, row_index


@dataclass(frozen=True)
class MicroBatchShare:
    """This rank's tokens of a micro-batch. Operations that couple tokens (capacity, auxiliary losses) act on the tokens
    of all ranks that share it."""

    tokens: Tokens
    """The tokens of this context parallel rank."""
    count: int
    """Tokens that this rank routes."""
    group: Group
    """Ranks that share the micro-batch; each routes `count` of its tokens."""
    sequence_group: Group
    """Ranks among which the tokens of a context parallel rank are split, in memory order; None: they are not split."""

    real: Tensor | None = None
    """bool [t]: which of this rank's tokens are not padding. None: all."""

    @functools.cached_property
    def routed_total(self) -> Tensor | int:
        """Number of tokens of the whole micro-batch without padding. If there is a padding mask, it is a float64 scalar
        on the device, at least 1."""
        if self.real is None:
            return self.total
        return all_reduce(self.real.sum().double(), self.group).clamp(min=1.0)

    @property
    def ranks(self) -> int:
        """Number of ranks in the group."""
        return group_size(self.group)

    @property
    def total(self) -> int:
        """Number of tokens of the whole micro-batch."""
        return self.count * self.ranks

    @property
    def sample_length(self) -> int:
        """Number of tokens of a sample: a row, or one of the samples of a packed row."""
        return self.tokens.sample_length or self.tokens.row_length

    @property
    def samples(self) -> int:
        """Number of samples of the whole micro-batch."""
        return self.total // self.sample_length

    def sample_numbers(self, device: torch.device) -> Tensor:
        """Returns the index of the sample that each of this rank's tokens belongs to: int64 [t]."""
        position, row = self._places(device)
        return self.cut((position + row * self.tokens.row_length) // self.sample_length)

    def order(self, device: torch.device) -> Tensor | None:
        """Returns the index of each of this rank's tokens in the whole micro-batch, sequence-major: int64 [t]. None if
        this rank has the whole micro-batch."""
        if self.ranks == 1:
            return None
        position, row = self._places(device)
        return self.cut(position * self.tokens.batch_size + row)

    def gather(self, rows: Tensor) -> Tensor:
        """Gathers the rows [t, ...] of all ranks: [total, ...], rank by rank."""
        return gather_rows(rows, self.group)

    def own(self, rows: Tensor) -> Tensor:
        """Returns this rank's rows [t, ...] of gathered rows [total, ...]."""
        return rows.narrow(0, group_rank(self.group) * self.count, self.count)

    def cut(self, index: Tensor) -> Tensor:
        """Returns the entries of `index`, which has one per token of this context parallel rank, for the tokens that
        this rank routes."""
        return index.flatten().chunk(group_size(self.sequence_group))[group_rank(self.sequence_group)]

    def noise_position(self, seed: int, layer: int, site: str, device: torch.device) -> DropoutRngPosition:
        """Returns the position of this rank's tokens for random noise. If the tokens have no position in the run, it is
        the position of the first iteration under `seed`, which is equal on all ranks and in recomputed layers."""
        tokens = dataclasses.replace(self.tokens, random=self.tokens.random or RngPosition(seed, 0))
        numbers = dropout_tokens(tokens, device)
        return DropoutRngPosition(dataclasses.replace(numbers, index=self.cut(numbers.index)), layer, site)

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        position = row_index(self.tokens, device)[:, None]  # [s, 1]
        return position, torch.arange(self.tokens.batch_size, device=device)


def micro_batch_share(
    tokens: Tokens,
    count: int,
    groups: ProcessGroupCollection,
    sequence_parallel: bool,
    padding_mask: Tensor | None = None,
) -> MicroBatchShare:
    """Returns the share of a rank that routes `count` of the `tokens` of its context parallel rank: a part of them with
    `sequence_parallel`, else all. `padding_mask` [b, s] is True for tokens of that rank that are padding."""
    parts, group = sequence_parallel and groups.size("tp") > 1, None
    if parts or groups.size("cp") > 1:
        group = groups.tp_cp if parts else groups.cp
    share = MicroBatchShare(tokens, count, group, groups.tp if parts else None)
    if padding_mask is None:
        return share
    return dataclasses.replace(share, real=share.cut(~padding_mask.to(torch.bool).t().contiguous()))


def micro_batch_share_of_rows(
    s: int, b: int, groups: ProcessGroupCollection, sequence_parallel: bool
) -> MicroBatchShare:
    """Returns the share of a rank whose tokens are those of `whole_rows`."""
    return micro_batch_share(whole_rows(s, b, groups, sequence_parallel), s * b, groups, sequence_parallel)


def whole_rows(s: int, b: int, groups: ProcessGroupCollection, sequence_parallel: bool) -> Tokens:
    """Returns the tokens of a context parallel rank, given only that this rank has [s, b] tokens of whole rows."""
    return Tokens(s * (groups.size("tp") if sequence_parallel else 1), b, sequence_part(groups))
