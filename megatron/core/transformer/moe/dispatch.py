"""What token dispatchers have in common.

Experts are distributed over an expert parallel group (`ep`), whole or, with expert tensor parallelism (`expt_tp`), by
channels. Every rank has its own tokens. All ranks that hold channels of an expert receive a copy of its tokens, and
their results are summed.

A dispatcher plans an exchange for each micro-batch. `start_dispatch` starts it, and `finish_dispatch` returns the rows
of this rank's experts. `start_combine` starts to send the results back, and `finish_combine` returns one sum per token.
Computation between a start and its finish hides the exchange, in forward and in backward.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from megatron.core.backends import Backend, choose_backend
from megatron.core.communication.async_collective import AsyncCollective
from megatron.core.communication.collectives import gather_rows, group_rank, group_size
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.micro_batch import CooperativeTurn
from megatron.core.ops.moe.grouped_linear import RowGroups
from megatron.core.ops.moe.permute import Copies
from megatron.core.transformer.moe.routing import Routing
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class ExpertRows:
    """Input of a rank's experts: rows sorted by expert, within an expert by source rank and then by token."""

    rows: Tensor
    """[n, h]"""
    weights: Tensor
    """[n]: the router's weight of each row, float32 at least."""
    groups: RowGroups
    """Number of rows of each expert."""


class DispatchCombine(ABC):
    """The dispatch and combine of one micro-batch."""

    def __init__(self, at: "TokenDispatcher", routing: Routing, turn: CooperativeTurn | None) -> None:
        self.at, self.routing, self.turn = at, routing, turn
        self._exchange: AsyncCollective | None = None

    @abstractmethod
    def start_dispatch(self, hidden: Tensor) -> None:
        """Starts to send the tokens [t, h]."""

    @abstractmethod
    def finish_dispatch(self) -> ExpertRows:
        """Waits, and returns the rows of this rank's experts."""

    @abstractmethod
    def start_combine(self, results: Tensor) -> None:
        """Starts to return the experts' results, [n, h]."""

    @abstractmethod
    def finish_combine(self) -> Tensor:
        """Waits, and returns the sum of the results of each token's experts, [t, h]."""


class TokenDispatcher(ABC):
    """Base class of dispatchers: knows which ranks hold which experts. Raises UserError if the experts cannot be
    divided among them."""

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection, backend: Backend | None = None
    ) -> None:
        assert config.num_moe_experts is not None
        self.num_experts = config.num_moe_experts
        self.ep_group, self.etp_group = pg_collection.ep, pg_collection.expt_tp
        self.ep_size, self.etp_size = group_size(self.ep_group), group_size(self.etp_group)
        if self.num_experts % self.ep_size:
            raise UserError(
                f"num_moe_experts {self.num_experts} is not divisible by {self.ep_size} expert parallel ranks"
            )
        self.num_local_experts = self.num_experts // self.ep_size
        self.ep_rank, self.etp_rank = group_rank(self.ep_group), group_rank(self.etp_group)
        self.backend = backend or choose_backend(config)
        self.copies_sizes = True
        """Whether the host always gets the number of rows of each expert. If not, it gets them only where the sizes of
        exchanges need them."""

    def leave_sizes_on_device(self) -> None:
        """The experts of this layer do not read the number of their rows on the host."""
        self.copies_sizes = False

    @abstractmethod
    def plan(self, routing: Routing, turn: CooperativeTurn | None = None) -> DispatchCombine:
        """Returns the exchange for a routing."""

    def of_all_ranks(self, rows: Tensor) -> Tensor:
        """Gathers rows [n, ...] of all ranks that share the experts: [etp * ep * n, ...], by etp rank, then by ep
        rank."""
        return gather_rows(gather_rows(rows, self.ep_group), self.etp_group)

    def weights_of(self, weights: Tensor, copies: Copies, choice: Tensor) -> Tensor:
        """Returns the weight of each copy [n], given those of all choices [t, k]."""
        flat = Copies(choice, copies.places.view(-1, 1))
        return self.backend.experts.permute(weights.reshape(-1, 1), flat)[:, 0]


def first_rows(copies: Copies, choice: Tensor, count: int) -> tuple[Copies, Tensor]:
    """Returns the first `count` rows of copies and their choices."""
    if count == choice.shape[0]:
        return copies, choice
    return Copies(copies.source[:count], copies.places), choice[:count]
