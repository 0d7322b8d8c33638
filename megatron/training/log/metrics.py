"""Keeps metrics on the device until the log line needs them, then copies them to the host at once.

`StepMetrics.record` queues a few small kernels and reads nothing. `StepMetrics.collect` is called at the log line and
before a save. It sums the losses over the data parallel ranks with one all-reduce, copies everything since the last
call with one copy, and names the values that were not finite.

The averages are Megatron-LM's: the loss of an iteration is its sum over its count, both over micro-batches and data
parallel ranks; the loss of a log line is the plain mean over the iterations since the last line whose update was
applied. A report of one value is averaged over micro-batches and ranks.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.communication.collectives import Group, all_reduce
from megatron.training.data.sources import SOURCE
from megatron.training.log.finite import NonFinite, name_non_finite
from megatron.training.log.records import StepRecord, StepResult
from megatron.training.state import TrainState


@dataclass(frozen=True)
class MetricsInterval:
    """The values that `StepMetrics.collect` read."""

    steps: tuple[StepRecord, ...]
    """The iterations since the last call."""
    losses: Mapping[str, float]
    """Mean over the applied and finite iterations since the last reset; empty if there is none."""
    iterations: int
    """Counted since the last reset, like the next two fields."""
    skipped: int
    nan: int
    """Iterations with a non-finite loss."""
    non_finite: tuple[NonFinite, ...]
    """Non-finite values of this rank since the last call."""


@dataclass
class _PendingRecord:
    """One recorded iteration whose values are still on the device."""

    record: StepRecord
    """The record with the values that the host knows."""
    names: tuple[str, ...]
    values: Tensor
    """[micro-batches, names, 2] float64: sums and counts of this rank."""
    scalars: dict[str, Tensor]
    """The other values of the step, by name, as far as they were measured."""
    gradients_finite: tuple[Tensor, ...]
    sample_ids: Sequence[Sequence[int]]


@dataclass
class _Averages:
    """Sums and counts since the last reset."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    iterations: int = 0
    skipped: int = 0
    nan: int = 0

    def add(self, step: StepRecord) -> None:
        self.iterations += 1
        self.skipped += not step.applied
        self.nan += not all(math.isfinite(loss) for loss in step.losses.values())
        if step.applied:
            for name, loss in step.losses.items():
                if math.isfinite(loss):
                    self.sums[name] = self.sums.get(name, 0.0) + loss
                    self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        return {name: total / self.counts[name] for name, total in self.sums.items()}


class StepMetrics:
    """Collects the values of training iterations, as the module's text describes.

    Args:
        device: where losses and norms live.
        group: ranks over which losses are summed (data and context parallel); None: this rank alone.
        rank: global rank, for naming.
        expect_overflow: a skipped update with finite losses is normal (fp16 with a dynamic loss scale): it is counted
            but not named.
        names: name non-finite values; False on ranks that see no values, and on ranks that see the same values as
            another rank that names them.
        watch: copy one flag a step to the host, without waiting for it, for `trouble_seen`.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        group: Group = None,
        rank: int = 0,
        expect_overflow: bool = False,
        names: bool = True,
        watch: bool = True,
    ) -> None:
        self.device = torch.device(device)
        self.group = group
        self.rank = rank
        self.expect_overflow = expect_overflow
        self.names = names
        self._pending: list[_PendingRecord] = []
        self._averages = _Averages()
        self._trouble = torch.zeros((), dtype=torch.bool, device=self.device) if watch else None
        pinned = self.device.type == "cuda"
        self._trouble_on_host = torch.zeros((), dtype=torch.bool, pin_memory=pinned)
        # The MPS backend has no float64.
        self._dtype = torch.float32 if self.device.type == "mps" else torch.float64

    # -----------------------------------------------------------------------------------------------------------------
    # During the step: nothing here waits for the device

    def record(self, result: StepResult, counts: TrainState) -> None:
        """Takes the results of one iteration; `counts` are those of the run after it. Tensors are copied on the device
        at once and may be reused. An update that was not applied counts as a non-finite step unless the spike's verdict
        refused it."""
        names = tuple(result.reports[0]) if result.reports else ()
        pending = _PendingRecord(
            record=StepRecord(
                iteration=counts.iteration,
                losses={},
                consumed_samples=counts.consumed_train_samples,
                tokens=counts.consumed_tokens,
                global_batch_size=result.global_batch_size,
            ),
            names=names,
            values=self._stack(result.reports, names),
            scalars={name: self._scalar(value) for name, value in _scalars(result).items() if value is not None},
            gradients_finite=tuple(self._scalar(flag) for flag in result.gradients_finite),
            sample_ids=result.sample_ids,
        )
        self._pending.append(pending)
        if self._trouble is not None:
            self._look_for_trouble(pending, self._trouble)

    def trouble_seen(self) -> bool:
        """Returns whether a non-finite value is known to have occurred on this rank. Never waits; on a GPU the
        answer may be a step or two late. Needs `watch`."""
        return bool(self._trouble_on_host)

    def _scalar(self, value: Tensor) -> Tensor:
        return value.detach().reshape(()).to(self.device, self._dtype, non_blocking=True, copy=True)

    def _stack(self, reports: Sequence[Mapping[str, Tensor]], names: tuple[str, ...]) -> Tensor:
        """Returns sums and counts, [micro-batches, names, 2]."""
        if not names:
            return torch.empty(0, 0, 2, dtype=self._dtype, device=self.device)
        columns = []
        for name in names:
            values = [report[name].detach().reshape(-1) for report in reports]
            assert values[0].numel() in (1, 2), f"the report {name!r} has {values[0].numel()} values, not 1 or 2"
            column = torch.stack(values).to(self.device, self._dtype, non_blocking=True)
            if column.size(1) == 1:
                column = torch.cat([column, torch.ones_like(column)], dim=1)
            columns.append(column)
        return torch.stack(columns, dim=1)

    def _look_for_trouble(self, pending: _PendingRecord, trouble: Tensor) -> None:
        trouble |= ~torch.isfinite(pending.values).all()
        if not self.expect_overflow:
            flags = list(pending.gradients_finite)
            allowed = pending.scalars.get("update_allowed", torch.ones_like(trouble))
            flags.append(pending.scalars["update_applied"].bool() | ~allowed.bool())
            trouble |= ~torch.stack([flag.bool() for flag in flags]).all()
        self._trouble_on_host.copy_(trouble, non_blocking=True)

    # -----------------------------------------------------------------------------------------------------------------
    # At the log line

    def forget(self) -> None:
        """Drops everything recorded, and the averages: the run goes back to an earlier iteration."""
        self._pending, self._averages = [], _Averages()

    def collect(self, *, reset: bool) -> MetricsInterval:
        """Reads everything recorded so far: one all-reduce, one copy. Every rank of `group` must call it.

        `reset` starts new averages; without it the next line also averages over these iterations.
        """
        with synchronization_allowed(self.device):
            host, reduced = self._to_host()
        steps, non_finite = [], []
        for pending in self._pending:
            step, named = self._finish(pending, host, reduced)
            steps.append(step)
            non_finite += named
            self._averages.add(step)
        self._pending = []
        averages = self._averages
        if reset:
            self._averages = _Averages()
        return MetricsInterval(
            steps=tuple(steps),
            losses=averages.means(),
            iterations=averages.iterations,
            skipped=averages.skipped,
            nan=averages.nan,
            non_finite=tuple(non_finite),
        )

    def _to_host(self) -> tuple[Iterator[float], Iterator[float]]:
        """Returns the values of this rank and the sums over all ranks, in the order in which `_finish` reads them."""
        if not self._pending:
            return iter(()), iter(())
        local = []
        for pending in self._pending:
            local += [pending.values.reshape(-1), *(scalar.view(1) for scalar in pending.gradients_finite)]
            local += [scalar.view(1) for scalar in pending.scalars.values()]
        totals = torch.cat([pending.values.sum(dim=0).view(-1) for pending in self._pending])
        if totals.numel():  # empty on ranks that compute no loss
            all_reduce(totals, self.group)
        values = torch.cat([*local, totals]).cpu()
        split = values.numel() - totals.numel()
        return iter(values[:split].tolist()), iter(values[split:].tolist())

    def _finish(
        self, pending: _PendingRecord, host: Iterator[float], reduced: Iterator[float]
    ) -> tuple[StepRecord, list[NonFinite]]:
        microbatches = [
            {name: _ratio(next(host), next(host)) for name in pending.names} for _ in range(len(pending.values))
        ]
        finite = [bool(next(host)) for _ in pending.gradients_finite]
        measured: dict[str, Any] = {name: next(host) for name in pending.scalars}
        applied = bool(measured.pop("update_applied"))
        num_zeros = measured.pop("num_zeros", None)
        measured.pop("update_allowed", None)
        if measured.get("max_attention_logit") == -math.inf:  # no layer has attention
            del measured["max_attention_logit"]
        z_score, is_spike = measured.pop("loss_z_score", None), bool(measured.pop("loss_spike", False))
        totals = {name: (next(reduced), next(reduced)) for name in pending.names}
        step = replace(
            pending.record,
            losses={name: _ratio(*total) for name, total in totals.items() if SOURCE not in name},
            by_source={
                name: (_ratio(*total), total[1]) for name, total in totals.items() if SOURCE in name and total[1]
            },
            applied=applied,
            num_zeros=None if num_zeros is None else int(num_zeros),
            loss_z_score=None if z_score is None or math.isnan(z_score) else z_score,
            loss_spike=is_spike,
            **measured,
        )
        if not self.names:
            return step, []
        named = name_non_finite(
            self.rank,
            step.iteration,
            microbatches,
            [] if self.expect_overflow else finite,
            None if self.expect_overflow else step.grad_norm,
            pending.sample_ids,
        )
        return step, named


def _scalars(result: StepResult) -> dict[str, Tensor | None]:
    """Returns the values of a step that are single numbers, by name; None for those that were not measured."""
    update, spike = result.update, result.spike
    scalars = {
        "grad_norm": update.grad_norm,
        "update_applied": update.update_applied,
        "num_zeros": update.num_zeros,
        "max_attention_logit": update.max_attention_logit,
        "params_norm": result.params_norm,
        "loss_scale": result.loss_scale,
        "learning_rate": result.learning_rate,
        "decoupled_learning_rate": result.decoupled_learning_rate,
    }
    if spike is not None:
        scalars |= {
            "loss_z_score": spike.z_score,
            "loss_spike": spike.is_spike,
            "update_allowed": spike.update_allowed,
        }
    return scalars


def _ratio(total: float, count: float) -> float:
    """Returns sum over count, and the sum if the count is 0."""
    return total / count if count else total


@contextlib.contextmanager
def synchronization_allowed(device: torch.device) -> Iterator[None]:
    """Allows the host to wait for the device inside the context, while torch's sync debug mode forbids it elsewhere."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
