"""The parts of a run that is ready to train (`Trainer`), and the small steps that the training loop consists of."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.declarations.flag_grammars import ends_of
from megatron.core.distributed import DistributedDataParallel
from megatron.core.exceptions import UserError
from megatron.core.health.rerun_state_machine import RerunStateMachine
from megatron.core.optimizer import MegatronOptimizer, StepUpdate
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.timers import timed
from megatron.core.utils.url_keys import hide_keys
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.checkpoints import Checkpoints
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.loaders import WorkerCrashed, WorkerStopped, error_of_worker
from megatron.training.data.splits import Splits
from megatron.training.evaluation.predictor import LayoutPredictor
from megatron.training.evaluation.tasks import EvaluationTasks
from megatron.training.hooks.exit import ExitAgreement, ExitDecision, ExitReason
from megatron.training.hooks.hook import Hooks
from megatron.training.launch.environment import Environment
from megatron.training.launch.errors import write_launcher_error_file
from megatron.training.log.finite import GradientProbe
from megatron.training.log.records import StepResult
from megatron.training.log.training_log import TrainingLog
from megatron.training.loss_spikes import LossSpikes
from megatron.training.providers import ForwardStep, NonLossFunctions
from megatron.training.skipped_updates import SkippedUpdates
from megatron.training.state import SavedParts, TrainState


@dataclass
class Trainer:
    """The parts of a run. Built by `setup.set_up`; the loop (`megatron.training.loop`) works on it."""

    config: PretrainConfig
    environment: Environment
    state: TrainState
    model: Sequence[DistributedDataParallel]
    """This rank's chunks, wrapped."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    batches: BatchSchedule
    forward_backward: Callable[..., Any]
    forward_step: ForwardStep
    splits: Splits
    log: TrainingLog
    hooks: Hooks
    exit: ExitAgreement
    checkpoints: Checkpoints
    probe: GradientProbe | None = None
    """Tells which micro-batch made the gradients non-finite."""
    results: RerunStateMachine | None = None
    """Checks the results that the loss function hands to it."""
    update: Callable[[Tensor], StepUpdate] | None = None
    """The optimizer's step as a CUDA graph; None: `optimizer.step_on_device`."""
    spikes: LossSpikes | None = None
    """Judges the losses (--loss-spike-action)."""
    skips: SkippedUpdates | None = None
    """Counts the updates skipped in a row (--max-consecutive-skips)."""
    open_data: Callable[[], Splits] | None = None
    """Opens the data at the counts of `state`. None: the data is a script's own and cannot go back."""

    non_loss: NonLossFunctions | None = None
    """A script's functions for data of evaluations other than losses."""
    tasks: EvaluationTasks | None = None
    """The tasks that every evaluation of the validation set scores (--eval-tasks)."""

    def __post_init__(self) -> None:
        self.phase = "training"
        self.last_step: StepResult | None = None
        self.evaluations: dict[str, Mapping[str, float]] = {}
        self.hooks.attach(self)
        self.last_validated: int | None = None

    @property
    def phase(self) -> str:
        """The current phase (training, validation, save), for the message of a failure."""
        return self.environment.progress.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.environment.progress.enter(phase, self.state.iteration)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.environment.device

    @property
    def saved_parts(self) -> SavedParts:
        """The parts of this run whose state its checkpoints keep."""
        return SavedParts(self.state, self.model, self.optimizer, self.scheduler, self.spikes)

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Marks a phase (evaluation, saving) for error messages. After an exception the phase stays set, so that the
        message names it."""
        self.phase, before = phase, self.phase
        yield
        self.phase = before

    # One step --------------------------------------------------------------------------------------------------------

    def begin_step(self) -> int:
        """Prepares for the next global batch: sets the batch size and the place in the data. Returns the number of
        micro-batches on this rank."""
        self.environment.progress.reach(self.state.iteration)
        self.batches.update(self.state.consumed_train_samples)
        self.splits.train.begin(self.state.iteration)
        if self.splits.train.recent is not None:
            self.splits.train.recent.begin(self.state)
        return self.splits.train.count(self.batches.num_microbatches)

    def record_step(self, result: StepResult) -> None:
        """Counts what a step consumed, and whether its update was skipped. Passes its results to the log."""
        self.last_step = result
        samples = result.global_batch_size
        self.state.add_step(
            samples,
            tokens=samples * self.config.data.seq_length,
            operations=samples * (self.log.flops_per_sample or 0.0),
        )
        if self.skips is not None:
            self.skips.count(result, self.optimizer.get_loss_scale())
        self.log.step(result, self.state)

    def skips_step(self) -> bool:
        """Whether --iterations-to-skip names the next iteration, or a rewound run leaves it out."""
        return self.checkpoints.record.rewinds.leaves_out(self.state.iteration + 1) or self._is_asked_to_skip()

    def _is_asked_to_skip(self) -> bool:
        asked = map(ends_of, self.config.training.iterations_to_skip)
        return any(first <= self.state.iteration + 1 <= last for first, last in asked)

    def skip_step(self) -> None:
        """Reads the data of the next iteration and does not train on it."""
        why = "--iterations-to-skip" if self._is_asked_to_skip() else "--loss-spike-action rewind"
        for _ in range(self.begin_step()):
            next(self.splits.train, None)
        samples = self.batches.global_batch_size
        self.state.add_skipped_step(samples)
        self.log.event("skip", self.state.iteration, samples=samples)
        if self.environment.logs:
            print(f"iteration {self.state.iteration} is skipped ({why})", flush=True)

    def full_logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Returns the logits after each token of some rows; see `LayoutPredictor.full_logits`. Collective."""
        size, length = self.config.evaluation.micro_batch_size(self.config.training), self.config.data.seq_length or 0
        predictor = LayoutPredictor(self.model, self.environment.groups, self.device, size, length)
        return predictor.full_logits(rows)

    # Evaluation ------------------------------------------------------------------------------------------------------

    def evaluation_is_due(self) -> bool:
        """Whether --eval-interval asks for an evaluation after this iteration."""
        interval = self.config.evaluation.eval_interval
        first = self.config.evaluation.start_eval_at_iter or 0
        due = interval and self.state.iteration % interval == 0 and self.state.iteration >= first
        return bool(due and (self.splits.valid is not None or self.tasks is not None))

    # Data ------------------------------------------------------------------------------------------------------------

    def reopen_data(self) -> None:
        """Closes the data and opens it again at the counts of `state`. Not for a script's own data."""
        assert self.open_data is not None
        self.splits.close()
        self.splits = self.open_data()

    # Saving and leaving ----------------------------------------------------------------------------------------------

    def check_exit(self) -> ExitDecision | None:
        """Returns the decision of all ranks to exit now, or None. Before a save and after the last iteration it waits
        for the answer of every rank: a run that resumed from the checkpoint of a non-finite step would skip the data of
        that step without a word."""
        decision = self.exit.after_step(self.state.iteration)
        if self.save_is_due(decision) or self.temporary_save_is_due() or self.is_done():
            self.log.flush()  # by now the host knows all that the device found
            decision = self.exit.resolve_pending()
        return decision

    def is_done(self) -> bool:
        """Whether the last iteration is done."""
        return self.state.iteration >= self.config.training.train_iters

    def save_is_due(self, decision: ExitDecision | None) -> bool:
        """Whether a checkpoint is due after this iteration: by --save-interval, or because the run exits."""
        checkpoint = self.config.checkpoint
        if checkpoint.save is None or self.state.iteration == self.checkpoints.last_saved:
            return False
        if decision is not None:
            return decision.save
        interval = checkpoint.save_interval
        return bool(interval and self.state.iteration % interval == 0)

    def temporary_save_is_due(self) -> bool:
        """Whether --non-persistent-save-interval asks for a checkpoint after this iteration and --save-interval asks
        for none."""
        checkpoint, iteration = self.config.checkpoint, self.state.iteration
        if checkpoint.save is None or checkpoint.non_persistent_save_interval is None or self.is_done():
            return False
        persistent = checkpoint.save_interval and iteration % checkpoint.save_interval == 0
        return not persistent and iteration % checkpoint.non_persistent_save_interval == 0

    def save(self, *, temporary: bool = False) -> None:
        """Writes a checkpoint of this iteration, into the folder of temporary ones if `temporary`. With --async-save it
        only begins to write: the checkpoint is complete after `finish_save`. The printed time is the time that training
        waits."""
        timers = self.log.timers
        self.finish_save()
        with self.log.paused(), self.in_phase("saving"):
            if self.config.checkpoint.async_save:
                with timed(timers, "save-checkpoint", 0, barrier=True):
                    self.checkpoints.begin_save(self.saved_parts, temporary=temporary)
                timers.log(["save-checkpoint"])
                return
            with timed(timers, "save-checkpoint", 0, barrier=True):
                self.checkpoints.save(self.saved_parts, temporary=temporary)
            timers.log(["save-checkpoint"])
            if not temporary:
                self._after_save(self.state.iteration)

    def finish_save(self) -> None:
        """Waits for the checkpoint that --async-save is still writing, if there is one. All ranks call it together."""
        with self.in_phase("saving"):
            iteration = self.checkpoints.finish_save()
            if iteration is not None:
                self._after_save(iteration)

    def _after_save(self, iteration: int) -> None:
        self.log.event("save", iteration)
        self.hooks.after_save(iteration)

    def report_exit(self, decision: ExitDecision) -> None:
        """Logs and prints why the run ends before its last iteration."""
        if decision.reason is ExitReason.NON_FINITE:
            self.log.flush()
        self.log.event("exit", self.state.iteration, reason=decision.reason.value)
        if self.environment.logs:
            where = "" if decision.reason is ExitReason.INTERVAL else f" (iteration {self.state.iteration})"
            print(f"{decision.message}{where}", flush=True)

    def close(self) -> None:
        """Ends the run in order, data included. Every rank calls it."""
        self.close_training()
        self.splits.close()

    def close_training(self) -> None:
        """Ends the last save, hooks, exit agreement and log; the data stays open. Every rank calls it."""
        self.finish_save()
        self.checkpoints.close(self.is_done() and self.checkpoints.last_saved == self.state.iteration)
        self.phase = "exit"
        self.hooks.on_exit(self.state.iteration)
        self.exit.close()
        self.log.close()

    def close_after_failure(self, error: BaseException) -> None:
        """Ends the run after an exception, without other ranks, which may be gone. Prints which rank failed, and in
        which phase, unless heartbeats find that out. Raises the error of `error_of_worker` in place of torch's for a
        data worker: torch raises its own wherever the main thread is, so its traceback misleads."""
        gone = error if isinstance(error, WorkerStopped | WorkerCrashed) else error_of_worker(error)
        error = gone or error
        if self.environment.heartbeat is not None:
            self.environment.heartbeat.report(error)
        elif isinstance(error, Exception) and not isinstance(error, UserError):  # which is printed with its rank later
            rank, ranks = self.environment.rank, self.environment.world_size
            where = f"in {self.phase}, after iteration {self.state.iteration}"
            text = hide_keys(f"rank {rank} of {ranks} failed {where}: {error}")
            print(text, file=sys.stderr, flush=True)
            write_launcher_error_file(text if gone is not None else f"{text}\n{traceback.format_exc()}")
        for step in (
            self.checkpoints.leave_save,
            lambda: self.hooks.on_exit(self.state.iteration),
            self.log.close_writers,
            self.splits.close,
        ):
            with contextlib.suppress(Exception):  # a second failure must not hide the first
                step()
        if gone is not None:
            raise gone from None
