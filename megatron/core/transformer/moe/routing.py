"""Where a router sends tokens: the record that travels from the router to the dispatcher and the experts."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Token i of this rank goes to its j-th expert `experts[i, j]` and counts there by `weights[i, j]`."""

    experts: Tensor
    """int64 [t, k]: global numbers, those of one token all different."""
    weights: Tensor
    """[t, k], float32 at least; carries the gradient to the router. 0 where a token was dropped."""
    kept: Tensor | None = None
    """bool [t, k]: False where an expert has no room for the token. None: nothing was dropped."""

    def tokens_per_expert(self, num_experts: int) -> Tensor:
        """int64 [experts]: tokens of this rank that each expert takes. Does not wait for the device."""
        counts = torch.zeros(num_experts, dtype=torch.int64, device=self.experts.device)
        return counts.scatter_add_(0, self.experts.flatten(), self.taken().flatten())

    def taken(self) -> Tensor:
        """int64 [t, k]: 1, or 0 where the expert has no room for the token."""
        return torch.ones_like(self.experts) if self.kept is None else self.kept.to(torch.int64)

    def experts_with_room(self) -> Tensor:
        """int64 [t, k]: `experts`, and -1 in place of one that has no room for the token."""
        return self.experts if self.kept is None else torch.where(self.kept, self.experts, -1)

    def dense(self, num_experts: int) -> tuple[Tensor, Tensor]:
        """The published form: weights [t, experts], zero where a token does not go, and a bool map [t, experts]."""
        t = self.experts.shape[0]
        weights = self.weights.new_zeros(t, num_experts).scatter(1, self.experts, self.weights)
        taken = self.taken().bool()
        chosen = torch.zeros(t, num_experts, dtype=torch.bool, device=taken.device).scatter(1, self.experts, taken)
        return torch.where(chosen, weights, weights.new_zeros(())), chosen
