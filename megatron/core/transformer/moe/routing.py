"""The result of a router: the record that dispatcher and experts read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.ops.moe.routing import count_experts


@dataclass(frozen=True)
class Routing:
    """Token i of this rank goes to experts `experts[i]`; the output of expert `experts[i, j]` has the weight
    `weights[i, j]`."""

    experts: Tensor
    """int64 [t, k]: global indices of the experts; the experts of one token are distinct."""
    weights: Tensor
    """[t, k], float32 at least, with gradient to the router. 0 if the token was dropped."""
    kept: Tensor | None = None
    """bool [t, k]: False if an expert has no capacity left for the token. None: no token was dropped."""
    counts: Tensor | None = None
    """int64 [experts]: number of this rank's tokens that each expert takes. None: not counted yet."""

    def tokens_per_expert(self, num_experts: int) -> Tensor:
        """Returns the number of this rank's tokens that each expert takes, int64 [experts]. Does not wait for the
        device."""
        return count_experts(self.experts, num_experts, self.kept) if self.counts is None else self.counts

    def taken(self) -> Tensor:
        """Returns int64 [t, k]: 1, or 0 if the expert has no capacity left for the token."""
        return torch.ones_like(self.experts) if self.kept is None else self.kept.to(torch.int64)

    def experts_with_room(self) -> Tensor:
        """Returns int64 [t, k]: `experts`, with -1 in place of experts that have no capacity left for the token."""
        return self.experts if self.kept is None else torch.where(self.kept, self.experts, -1)

    def dense(self, num_experts: int) -> tuple[Tensor, Tensor]:
        """Returns Megatron-LM's form: weights [t, experts], zero for experts that a token is not sent to, and a bool
        map [t, experts]."""
        t = self.experts.shape[0]
        weights = self.weights.new_zeros(t, num_experts).scatter(1, self.experts, self.weights)
        taken = self.taken().bool()
        chosen = torch.zeros(t, num_experts, dtype=torch.bool, device=taken.device).scatter(1, self.experts, taken)
        return torch.where(chosen, weights, weights.new_zeros(())), chosen
