"""Ends a run after loss spikes, or takes it back to a checkpoint (--loss-spike-action rewind). Takes a step back to its
start, to repeat it (--rerun-mode)."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.ops.fp8.recipes import DelayedScaling
from megatron.core.optimizer import MegatronOptimizer
from megatron.training.data.step_data import StepData
from megatron.training.hooks.exit import ExitDecision
from megatron.training.log.finite import GradientProbe
from megatron.training.rewind_record import Rewind
from megatron.training.trainer import Trainer


def go_back(trainer: Trainer, decision: ExitDecision) -> ExitDecision | None:
    """Goes back to the newest checkpoint from before the window of the spike, and leaves out the window's data from
    then on. Returns None if the run continues from there, or the decision to end, with the reason why it cannot go
    back. All ranks call it."""
    spikes, flags = trainer.spikes, trainer.config.resilience
    assert spikes is not None
    spike, limit = spikes.last_spike(), flags.loss_spike_limit
    if not spikes.rewinds:
        return _ending(decision, f"{limit} loss spikes in a row, the last in iteration {spike} (--loss-spike-limit)")
    if len(trainer.checkpoints.record.rewinds) >= limit:
        return _ending(
            decision, f"a loss spike in iteration {spike}, and {limit} rewinds before it (--loss-spike-limit)"
        )
    first = spike - flags.loss_spike_rewind_window + 1
    trainer.finish_save()
    found = _newest_before(trainer, first)
    if found is None:
        return _ending(
            decision,
            f"a loss spike in iteration {spike}: there is no checkpoint of an iteration before {first} to go back to "
            "(--loss-spike-rewind-window, --save-interval)",
        )
    root, iteration = found
    trainer.log.flush()
    with trainer.in_phase("rewinding"):
        parts = trainer.saved_parts
        trainer.checkpoints.reload(root, iteration, parts)
        trainer.checkpoints.record_rewind(Rewind(spike=spike, iteration=iteration, first=first), parts)
        trainer.log.go_back(iteration)
        trainer.log.event("rewind", iteration, spike=spike, left_out=[first, spike])
        trainer.reopen_data()
    trainer.exit.withdraw()
    if trainer.environment.logs:
        print(
            f"went back from the loss spike in iteration {spike} to iteration {iteration}; the data of iterations "
            f"{first} to {spike} is left out (--loss-spike-action rewind)",
            flush=True,
        )
    return None


def _ending(decision: ExitDecision, why: str) -> ExitDecision:
    return dataclasses.replace(decision, message=f"exiting program after {why}")


def _newest_before(trainer: Trainer, iteration: int) -> tuple[Path, int] | None:
    """Returns the folder and iteration of the checkpoint to go back to, as the first rank sees it; None if there is
    none."""

    def find() -> list[str | int] | None:
        found = trainer.checkpoints.record.newest_before(iteration)
        return None if found is None else [str(found[0]), found[1]]

    chosen = RankCoordinator(trainer.exit.group).run_on_first(find)
    return None if chosen is None else (Path(str(chosen[0])), int(chosen[1]))


def mark_step_start(
    model: Sequence[Any], optimizer: MegatronOptimizer, data: StepData | None, probe: GradientProbe | None
) -> Callable[[], bool]:
    """Marks the start of a step. Returns a function that restores data, gradients, the biases of experts and the
    histories of delayed fp8 scaling as they are now. That function returns False if the data is a script's own
    iterator, which cannot go back."""
    if data is not None:
        data.keep_step()
    modules = [module for chunk in model for module in chunk.modules()]
    routers = [module for module in modules if getattr(module, "expert_bias", None) is not None]
    biases = [router.expert_bias.detach().clone() for router in routers]
    histories = [module.mark_step_start() for module in modules if isinstance(module, DelayedScaling)]

    def go_back_to_start() -> bool:
        if data is None or not data.rewind():
            return False
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        for router, bias in zip(routers, biases, strict=True):
            router.expert_bias.copy_(bias)
            router.take_tokens_per_expert()
        for restore_history in histories:
            restore_history()
        if probe is not None:
            probe.take_tensors()
        return True

    return go_back_to_start
