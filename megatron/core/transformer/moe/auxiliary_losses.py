"""Auxiliary losses that balance the load of experts and keep router logits small.

Each function returns this rank's part of the micro-batch's loss. The loss is the sum over the ranks that share the
micro-batch's tokens, for any number of ranks. Coefficients are not included. Balance losses are 1 if all experts are
chosen equally often (Fedus et al. 2021, arXiv:2101.03961). The z-loss is defined by Zoph et al. 2022, arXiv:2202.08906.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.communication.collectives import Group, all_reduce, group_size
from megatron.core.ops.moe.routing import count_experts
from megatron.core.ops.precision import widened
from megatron.core.transformer.config.router import BALANCE_LOSSES, listed
from megatron.core.transformer.moe.micro_batch_share import MicroBatchShare
from megatron.core.utils.recompute_cache import run_once_under_recompute

LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}
"""Megatron-LM's names on the log line."""


def micro_batch_loss(sums: Tensor, counts: Tensor, topk: int, share: MicroBatchShare) -> Tensor:
    """Returns this rank's part of E / (k T^2) sum_i P_i n_i over the T tokens of the micro-batch. P_i are `sums` [E] of
    the scores of each expert (`balance_sums`), and n_i are `counts` (`count_experts`), both without padding."""
    chosen = all_reduce(counts.double(), share.group).to(sums.dtype)
    return (sums * chosen).sum() * (sums.shape[0] / (topk * share.routed_total**2))


def sequence_loss(scores: Tensor, experts: Tensor, share: MicroBatchShare) -> Tensor:
    """Returns the mean over samples of each sample's balance loss (DeepSeek-AI 2024, arXiv:2412.19437). Samples that
    are all padding do not count."""
    length, samples, num_experts = share.sample_length, share.samples, scores.shape[1]
    sample = share.sample_numbers(scores.device)
    membership = (sample[:, None] == torch.arange(samples, device=sample.device)).double()  # [t, samples]
    real_scores = scores if share.real is None else scores * share.real[:, None]
    sums = (membership.t() @ real_scores.double()).to(scores.dtype)
    cell = sample[:, None] * num_experts + experts
    chosen = all_reduce(count_experts(cell, samples * num_experts, share.real).double(), share.group)
    chosen = chosen.view(samples, -1).to(scores.dtype)
    if share.real is not None:
        lengths = all_reduce(membership.t() @ share.real.double(), share.group)
        of_samples = (sums * chosen).sum(1) / lengths.clamp(min=1.0).square()
        return of_samples.sum() * (num_experts / experts.shape[1]) / lengths.count_nonzero().clamp(min=1)
    return (sums * chosen).sum() * (num_experts / (experts.shape[1] * length**2 * samples))


@dataclass(eq=False)
class GlobalBalance:
    """Balance over the global batch so far: the micro-batches of this step up to now, of all data parallel ranks. Its
    value depends on their order, and therefore on the layout."""

    chosen: Tensor | None = None
    """Sums of counts, float64 [experts]."""
    calls: int = 0

    def loss(self, sums: Tensor, counts: Tensor, topk: int, share: MicroBatchShare, everyone: Group) -> Tensor:
        """Returns this rank's part of E / (k T T') sum_i P_i n_i. P_i are `sums` [E], as in `micro_batch_loss`. n_i are
        the tokens of expert i among the T' tokens that all ranks of `everyone` route together, as a mean over the
        micro-batches so far."""
        counted = run_once_under_recompute((self, "counts"), lambda: self._count(counts, everyone))
        mean = counted.to(sums.dtype)
        everywhere = share.count * group_size(everyone) if share.real is None else counted.sum() / topk
        tokens = share.routed_total * everywhere
        return (sums * mean).sum() * (sums.shape[0] / (topk * tokens))

    def _count(self, chosen: Tensor, everyone: Group) -> Tensor:
        counts = all_reduce(chosen.double(), everyone)
        self.chosen = counts if self.chosen is None else self.chosen + counts
        self.calls += 1
        return self.chosen / self.calls

    def reset(self) -> None:
        """Resets the counts at the start of a global batch."""
        self.chosen, self.calls = None, 0


def z_loss(logits: Tensor, share: MicroBatchShare) -> Tensor:
    """Returns this rank's part of the mean of logsumexp(logits)^2 over the micro-batch's tokens."""
    squares = torch.logsumexp(widened(logits), -1).square()
    if share.real is not None:
        return (squares * share.real).sum() / share.routed_total
    return squares.sum() / max(share.total, 1)


def coefficients(types: str | Sequence[str], values: float | Sequence[float]) -> dict[str, float]:
    """Returns the coefficients of the balance losses that are not 0, by type, in the order given."""
    kinds, weights = listed(types), listed(values)
    if len(weights) == 1:
        weights *= len(kinds)
    return {kind: value for kind, value in zip(kinds, weights, strict=True) if kind in BALANCE_LOSSES and value}
