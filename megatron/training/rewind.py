"""Ends a run after loss spikes, or takes it back to a checkpoint (--loss-spike-action rewind)."""

import dataclasses
from pathlib import Path

from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.training.hooks.exit import ExitDecision
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
