"""Loss spikes (--loss-spike-action): finds them on the device, and keeps what the decisions depend on.

A spike is a loss that lies more than --loss-spike-z-score standard deviations above the mean of the last
--loss-spike-history losses without spikes. The loss is that of the global batch. Every rank computes it from the same
all-reduced sums, so every rank decides alike. Nothing here waits for the device, except for `state_dict`, and for
reading `last_spike` once a spike ends or rewinds the run.

After a spike the optimizer changes nothing (`update_allowed`). The trainer then acts by --loss-spike-action:

    skip      training continues with the next batch; after --loss-spike-limit spikes in a row the run ends
    rewind    no later update is applied until the run has gone back to a checkpoint
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.communication.collectives import all_reduce
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.training.config.resilience import ResilienceConfig


@dataclass(frozen=True)
class SpikeVerdict:
    """What `LossSpikes.judge` found in one step; scalars on the device."""

    z_score: Tensor
    """Standard deviations above the mean; NaN until the history is full, and for a loss that is not finite."""
    is_spike: Tensor
    """Bool: whether the update is refused because of this step's own loss."""
    update_allowed: Tensor
    """Bool: False for a spike, and for each step after one that ends or rewinds the run."""


class LossSpikes:
    """Judges the loss of each step.

    Args:
        flags: those named --loss-spike-*; --loss-spike-action must be given.
        groups: ranks of the model and its replicas.
        device: where losses live.
    """

    def __init__(self, flags: ResilienceConfig, groups: ProcessGroupCollection, device: torch.device) -> None:
        assert flags.loss_spike_action is not None
        self.flags = flags
        self.groups = groups
        self.device = device
        # The MPS backend has no float64.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._history = torch.zeros(flags.loss_spike_history, dtype=self._dtype, device=device)
        self._places = torch.arange(flags.loss_spike_history, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        """Number of losses added to the history since the run began."""
        self._in_row = torch.zeros((), dtype=torch.int64, device=device)
        """Number of spikes in a row up to the last step."""
        self._last_spike = torch.zeros((), dtype=torch.int64, device=device)
        """Number of the last iteration with a spike; 0 if there was none."""
        self._held = torch.zeros((), dtype=torch.bool, device=device)
        """Whether the run has to end or go back. No update is applied any more."""
        self.update_allowed = torch.ones((), dtype=torch.bool, device=device)
        """Whether the optimizer may apply the update of this step. The same tensor in every step."""
        self._held_on_host = torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda")

    @torch.no_grad()
    def judge(self, reports: Sequence[Mapping[str, Tensor]], iteration: int) -> SpikeVerdict:
        """Decides about step `iteration` (from 1). Sets `update_allowed`. Collective over all ranks.

        `reports` has the reporting dict of each micro-batch; its first entry is the loss. It is empty on ranks that
        compute no loss.
        """
        loss = self._loss_of_step(reports)
        size = self._history.numel()
        deviation, mean = torch.std_mean(self._history, correction=0)
        score = (loss - mean) / deviation.clamp(min=1e-12)
        score = torch.where(self._count >= size, score, torch.full_like(score, torch.nan))
        spike = (score > self.flags.loss_spike_z_score) & ~self._held
        good = ~spike & ~self._held & loss.isfinite()
        self._history.copy_(torch.where(good & (self._places == self._count % size), loss, self._history))
        self._count += good
        self._in_row.copy_(torch.where(spike, self._in_row + 1, torch.where(good, 0, self._in_row)))
        self._last_spike.copy_(torch.where(spike, iteration, self._last_spike))
        self._held |= spike & (self._in_row >= (1 if self.rewinds else self.flags.loss_spike_limit))
        self.update_allowed.copy_(~spike & ~self._held)
        self._held_on_host.copy_(self._held, non_blocking=True)
        return SpikeVerdict(score, spike, self.update_allowed.clone())

    def _loss_of_step(self, reports: Sequence[Mapping[str, Tensor]]) -> Tensor:
        total = torch.zeros(2, dtype=self._dtype, device=self.device)
        for report in reports:
            value = next((value for value in report.values()), None)
            if value is not None:
                value = value.detach().reshape(-1).to(self.device, self._dtype)
                total += value if value.numel() == 2 else torch.cat([value, torch.ones_like(value)])
        for name in ("dp_cp", "mp"):
            if self.groups.size(name) > 1:
                all_reduce(total, getattr(self.groups, name))
        return total[0] / total[1]

    @property
    def rewinds(self) -> bool:
        """Whether a spike sends the run back to a checkpoint."""
        return self.flags.loss_spike_action == "rewind"

    def ends_run(self) -> bool:
        """Whether a spike ends the run or sends it back to a checkpoint. Never waits, so on a GPU the answer may be a
        step or two late."""
        return bool(self._held_on_host)

    def last_spike(self) -> int:
        """Returns the number of the last iteration that was a spike. Waits for the device."""
        return int(self._last_spike.item())

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what later decisions depend on, as JSON types. Waits for the device."""
        return {
            "history": self._history.tolist(),
            "count": int(self._count.item()),
            "in_row": int(self._in_row.item()),
            "last_spike": self.last_spike(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads what `state_dict` returned. None, or a history of another length, begins a new history."""
        state = state or {"in_row": 0, "last_spike": 0}
        self._held.fill_(False)
        self._held_on_host.fill_(False)
        self.update_allowed.fill_(True)
        self._in_row.fill_(state["in_row"])
        self._last_spike.fill_(state["last_spike"])
        history = state.get("history", [])
        fits = len(history) == self._history.numel()
        self._history.copy_(torch.tensor(history, dtype=self._dtype)) if fits else self._history.zero_()
        self._count.fill_(state["count"] if fits else 0)
