"""Ends a run after loss spikes, or takes it back to a checkpoint (--loss-spike-action rewind)."""

import dataclasses
from pathlib import Path

from megatron.core.dist_checkpointing import folders
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.training.hooks.exit import ExitDecision
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
    if len(spikes.left_out) >= limit:
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
        spikes.left_out.append((first, spike))
        parts = (trainer.state, trainer.model, trainer.optimizer, trainer.scheduler)
        trainer.checkpoints.reload(root, iteration, *parts)
        trainer.log.go_back(iteration)
        trainer.splits.close()
        assert trainer.open_data is not None
        trainer.splits = trainer.open_data()
    trainer.exit.withdraw()
    trainer.log.event("rewind", iteration, spike=spike, left_out=[first, spike])
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
    """Returns the folder and iteration of this run's newest checkpoint from before an iteration; None if there is none.
    Considers the checkpoints under --save that the first rank sees, and the one that was loaded."""
    flags, found = trainer.config.checkpoint, list[tuple[int, str]]()
    loaded = None if flags.finetune else flags.load  # with --finetune, the iterations are those of another run
    for root in dict.fromkeys(root for root in (flags.save, loaded) if root is not None):
        steps = [folder.step for folder in folders.candidates(Path(root))]
        found += [(step, root) for step in steps if isinstance(step, int) and step < iteration]
    newest = [*max(found)] if found else None
    chosen = RankCoordinator(trainer.exit.group).gather(newest)[0]
    return None if chosen is None else (Path(chosen[1]), int(chosen[0]))
