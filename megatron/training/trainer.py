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
from megatron.training.data.splits import Splits, ValidationSet
from megatron.training.data.step_data import StepData
from megatron.training.evaluate import EvaluationResult, evaluate, full_pass
from megatron.training.evaluation.predictor import LayoutPredictor
from megatron.training.evaluation.tasks import EvaluationTasks
from megatron.training.hooks.exit import ExitAgreement, ExitDecision, ExitReason
from megatron.training.hooks.hook import Hooks
from megatron.training.launch.environment import Environment
from megatron.training.launch.errors import write_launcher_error_file
from megatron.training.log.finite import GradientProbe
from megatron.training.log.records import StepResult, TaskRecord, ValidationRecord
from megatron.training.log.training_log import TrainingLog
from megatron.training.loss_spikes import LossSpikes
from megatron.training.providers import ForwardStep, NonLossFunctions
from megatron.training.skipped_updates import SkippedUpdates
from megatron.training.state import SavedParts, TrainState

OF_AVERAGE = "-ema"
"""End of the names of splits and tasks that the moving average of the weights was evaluated on (--ema-decay)."""


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
        self._last_validated: int | None = None

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
        return self.batches.num_microbatches

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

    def evaluate(self, split: str, *, at_end: bool = False) -> None:
        """Runs --eval-iters global batches of a split (`valid` or `test`) through the model, or with --full-validation
        the whole validation set, and logs the mean loss over their tokens. With --multiple-validation-sets it does so
        for each set; `consumed_valid_samples` counts the samples of one of them, since all advance together. The tasks
        of --eval-tasks follow the validation set. `at_end`: the log names the split in the words for the end of a
        run."""
        data: StepData | None = getattr(self.splits, split)
        data = data if self.config.evaluation.eval_iters else None
        tasks = self.tasks if split == "valid" else None
        if data is None and tasks is None:
            return
        if split == "valid":
            self._last_validated = self.state.iteration
        sets = self.splits.valid_sets if split == "valid" else ()
        sets = sets or (() if data is None else (ValidationSet(lambda: data),))
        with self.log.paused(), self.in_phase("evaluation"):
            self.hooks.before_evaluate(self.state.iteration)
            self.evaluations = {}
            results = self._evaluate_model(sets, tasks)
            if split == "valid" and results:
                self.state.consumed_valid_samples += results[0].samples
            averaged = []
            if self.optimizer.average is not None and not any(result.interrupted for result in results):
                with self.optimizer.average.in_place_of_weights():
                    averaged = self._evaluate_model(sets, tasks, of=OF_AVERAGE)
            name = {"valid": "validation"}.get(split, split)
            names = [name if each.name is None else f"{name}-{each.name}" for each in sets]
            found = [*zip(names, results, strict=False)]
            found += [(f"{name}{OF_AVERAGE}", result) for name, result in zip(names, averaged, strict=False)]
            self.evaluations |= {name: result.losses for name, result in found if result.losses}
            self.hooks.after_evaluate(self.state.iteration)
            for number, (title, result) in enumerate(found):
                self._log_evaluation(result, title, at_end, is_named=title != name)
                if number < len(results):
                    self._process_non_loss_data(result)

    def _evaluate_model(
        self, sets: Sequence[ValidationSet], tasks: EvaluationTasks | None, of: str = ""
    ) -> list[EvaluationResult]:
        """Evaluates the model as it is on data sets, and scores and logs tasks, whose names get the end `of`. Returns
        the result of each set, the last one perhaps interrupted."""
        results = []
        for each in sets:
            results.append(self._evaluate_set(each))
            if results[-1].interrupted:
                return results
        if tasks is not None:
            self._score_tasks(tasks, of)
        return results

    def _evaluate_set(self, valid_set: ValidationSet) -> EvaluationResult:
        """Runs one evaluation's part of a data set through the model."""
        training, evaluation = self.config.training, self.config.evaluation
        data, iterations = valid_set.open(), evaluation.eval_iters
        if valid_set.num_samples is not None:
            iterations = full_pass(valid_set.num_samples, evaluation.global_batch_size(training)).iterations
        data.begin(self.state.iteration)
        result = evaluate(
            self.forward_backward,
            self.forward_step,
            data.iterators(len(self.model)),
            self.model,
            num_iterations=iterations,
            num_microbatches=evaluation.num_microbatches(training, self.environment.groups.size("dp")),
            micro_batch_size=evaluation.micro_batch_size(training),
            seq_length=self.config.data.seq_length,
            decoder_seq_length=self.config.decoder_seq_length,
            device=self.device,
            group=self.environment.groups.dp_cp if self.environment.groups.size("dp_cp") > 1 else None,
            data_parallel_size=self.environment.groups.size("dp"),
            should_stop=lambda: self.exit.poll() is not None,
            non_loss=self.non_loss,
        )
        if valid_set.num_samples is not None:
            data.close()
        if result.interrupted and self.environment.logs:
            print(f"evaluation stopped after {result.iterations} of {iterations} iterations", flush=True)
        return result

    def _score_tasks(self, tasks: EvaluationTasks, of: str) -> None:
        """Scores the tasks of --eval-tasks and logs each when it is done."""
        for found in tasks.scores(lambda: self.exit.poll() is not None):
            iteration, consumed = self.state.iteration, self.state.consumed_train_samples
            self.evaluations[found.task + of] = {metric: score.value for metric, score in found.scores.items()}
            self.log.task(TaskRecord(iteration, found.task + of, found.pairs, found.documents, consumed))

    def _process_non_loss_data(self, result: EvaluationResult) -> None:
        """Passes an evaluation's data other than losses to the script's function, with the writer of --tensorboard-dir,
        on the rank that logs. Without that flag it calls nothing, as in Megatron-LM."""
        writer = self.log.tensorboard_writer
        if self.non_loss is None or self.non_loss.process is None or writer is None or result.interrupted:
            return
        self.non_loss.process(result.non_loss_data, self.state.iteration, writer)

    def _log_evaluation(self, result: EvaluationResult, split: str, at_end: bool, *, is_named: bool) -> None:
        if not result.losses:
            return
        where = f"iteration {self.state.iteration} on {split} set" if at_end else None
        if is_named:
            where = f"iteration {self.state.iteration} on {split}"
        record = ValidationRecord(
            self.state.iteration,
            result.losses,
            split=split,
            where=where,
            consumed_samples=self.state.consumed_train_samples,
            tokens=result.tokens,
            samples=result.samples,
            seconds=result.seconds,
        )
        self.log.validation(record)

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

    def finish(self) -> None:
        """Ends the run after the last iteration: saves the last checkpoint, then evaluates the validation set, unless
        --eval-interval has done so after this iteration, and the test set."""
        trained = not self.config.evaluation.skip_train
        if trained and self.config.checkpoint.save is not None and self.state.iteration != self.checkpoints.last_saved:
            self.save()
        if self._last_validated != self.state.iteration:
            self.evaluate("valid", at_end=True)
        self.evaluate("test", at_end=True)

    def close(self) -> None:
        """Ends the run in order, data included. Every rank calls it."""
        self.close_training()
        self.splits.close()

    def close_training(self) -> None:
        """Ends the last save, hooks, exit agreement and log; the data stays open. Every rank calls it."""
        self.finish_save()
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
