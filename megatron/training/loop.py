"""A run from its set-up to its end, `run_pretraining`; its loop, `train`; and one iteration of it, `train_step`.

`run_step` is the one training step of the app: Megatron-LM's `train_step` (megatron.facades.training) calls it too.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed import finalize_model_grads
from megatron.core.exceptions import UserError
from megatron.core.health.rerun_state_machine import RerunStateMachine
from megatron.core.optimizer import MegatronOptimizer, StepUpdate
from megatron.core.optimizer.clip_grads import weight_norm
from megatron.core.schedule.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.timers import Timers, timed
from megatron.core.utils.keywords import Keywords
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.sources import prefixes_of_run
from megatron.training.data.step_data import StepData, is_end_of_data, step_data_of
from megatron.training.evaluations import evaluate_split
from megatron.training.hooks.exit import ExitDecision, ExitReason
from megatron.training.launch.environment import Environment, process_environment
from megatron.training.launch.errors import delay_errors_on_other_ranks
from megatron.training.launch.lease import leases_of_run
from megatron.training.launch.same_inputs import check_same_inputs
from megatron.training.launch.signals import DEFAULT_SIGNALS, SignalWatch
from megatron.training.launch.start_times import startup_line
from megatron.training.log.finite import GradientProbe
from megatron.training.log.records import StepResult
from megatron.training.loss_spikes import SpikeVerdict
from megatron.training.providers import Providers
from megatron.training.rewind import go_back, mark_step_start
from megatron.training.setup.set_up import set_up
from megatron.training.trainer import Trainer


@dataclass(frozen=True)
class FailureHelp:
    """What is done about failures of a run, from above it. By default nothing."""

    explain_lack_of_gpu_memory: Callable[[PretrainConfig, Providers, Environment], AbstractContextManager[None]] = (
        lambda config, providers, environment: contextlib.nullcontext()
    )
    """Returns a context in which the error of a full GPU says what would help."""
    examine_early_end: Callable[[Trainer, ExitDecision], None] = lambda trainer, decision: None
    """Called when the run ends early, such as after a non-finite loss."""


def run_pretraining(
    config: PretrainConfig, providers: Providers, started: float, failures: FailureHelp | None = None
) -> ExitDecision | None:
    """Sets up, trains and finishes a run. Returns the decision of an early exit, or None. On return all processes,
    threads and groups that the run started have ended."""
    watched = {*DEFAULT_SIGNALS, config.resilience.exit_signal}
    with (
        SignalWatch(sorted(watched)) as signals,
        process_environment(config, providers.use_torch_distributed, providers.publication) as environment,
    ):
        try:
            check_same_inputs(config, prefixes_of_run)
            with leases_of_run(config, environment):
                return set_up_and_train(config, providers, environment, signals, started, failures or FailureHelp())
        except UserError as error:
            if environment.heartbeat is not None:
                environment.heartbeat.report(error)
            delay_errors_on_other_ranks()
            raise


def set_up_and_train(
    config: PretrainConfig,
    providers: Providers,
    environment: Environment,
    signals: SignalWatch,
    started: float,
    failures: FailureHelp,
) -> ExitDecision | None:
    """Runs the part of `run_pretraining` inside the process groups."""
    decision = None
    with failures.explain_lack_of_gpu_memory(config, providers, environment):
        trainer = set_up(config, providers, environment, signals, started)
    if environment.heartbeat is not None:
        environment.heartbeat.call_before_end(trainer.checkpoints.leave_save)
    line = startup_line()
    if line is not None and environment.is_first:
        print(line, flush=True)
    try:
        with signals.training(), failures.explain_lack_of_gpu_memory(config, providers, environment):
            if not config.evaluation.skip_train:
                decision = train(trainer)
            if decision is not None:
                failures.examine_early_end(trainer, decision)
            else:
                finish(trainer)
            trainer.close()
    except BaseException as error:
        trainer.close_after_failure(error)
        raise
    return decision


def train(trainer: Trainer) -> ExitDecision | None:
    """Iterates until the last iteration or until the ranks agree to exit; returns the decision of an early exit."""
    state, decision = trainer.state, None
    if trainer.is_done() and trainer.environment.logs:
        total = trainer.config.training.train_iters
        print(f"nothing is left to train: iteration {state.iteration} of {total}", flush=True)
    trainer.log.start(state.iteration)
    trainer.hooks.on_start(state.iteration)
    while decision is None and not trainer.is_done():
        trainer.hooks.before_step(state.iteration)
        if trainer.skips_step():
            trainer.skip_step()
        else:
            trainer.record_step(train_step(trainer))
        trainer.hooks.after_step(state.iteration)
        if trainer.evaluation_is_due():
            evaluate_split(trainer, "valid", at_end=trainer.is_done())
        decision = trainer.check_exit()
        if decision is not None and decision.reason is ExitReason.LOSS_SPIKE:
            decision = go_back(trainer, decision)
        if trainer.save_is_due(decision):
            trainer.save()
        elif decision is None and trainer.temporary_save_is_due():
            trainer.save(temporary=True)
    if decision is not None:
        trainer.report_exit(decision)
    return decision


def finish(trainer: Trainer) -> None:
    """Ends a run after its last iteration: saves the last checkpoint, then evaluates the validation set, unless
    --eval-interval has done so after this iteration, and the test set."""
    iteration, saves = trainer.state.iteration, trainer.config.checkpoint.save is not None
    if not trainer.config.evaluation.skip_train and saves and iteration != trainer.checkpoints.last_saved:
        trainer.save()
    if trainer.last_validated != iteration:
        evaluate_split(trainer, "valid", at_end=True)
    evaluate_split(trainer, "test", at_end=True)


def train_step(trainer: Trainer) -> StepResult:
    """Runs one global batch forward and backward, then one update. Nothing here waits for the device."""
    num_microbatches, spikes = trainer.begin_step(), trainer.spikes
    judge = None if spikes is None else partial(spikes.judge, iteration=trainer.state.iteration + 1)
    with explains_end_of_data(trainer):
        result = run_step(
            StepParts(
                trainer.forward_backward,
                trainer.forward_step,
                trainer.model,
                trainer.optimizer,
                trainer.scheduler,
                timers=trainer.log.timers,
                results=trainer.results,
                probe=trainer.probe,
                update=trainer.update,
                judge=judge,
            ),
            StepSizes.of_run(trainer.config, num_microbatches, trainer.batches.global_batch_size),
            trainer.splits.train.iterators(len(trainer.model)),
            arguments_of_schedule(trainer.optimizer, trainer.splits.train),
        )
    return dataclasses.replace(
        result,
        params_norm=norm_of_weights(trainer),
        sample_ids=trainer.splits.train.sample_ids,
        gradients_finite=[] if trainer.probe is None else trainer.probe.take_tensors(),
    )


@contextlib.contextmanager
def explains_end_of_data(trainer: Trainer) -> Iterator[None]:
    """Turns the end of the training data within a step into a UserError: a script's own data may be too short."""
    try:
        yield
    except (StopIteration, RuntimeError) as error:
        if not is_end_of_data(error):
            raise
        done, planned = trainer.state.iteration, trainer.config.training.train_iters
        raise UserError(
            f"the training data ended in iteration {done + 1} of {planned}; lower --train-iters to {done} or give more "
            "data"
        ) from error


def arguments_of_schedule(optimizer: MegatronOptimizer, data: StepData) -> dict[str, object]:
    """Returns the arguments that our schedules take in addition to Megatron-LM's. If a script has set one of these
    functions in its TransformerConfig, the schedule uses that one."""
    return {
        "rng_position_of": data.rng_position_of,
        "grad_scale_func": optimizer.scale_loss,
        "finalize_model_grads_func": finalize_model_grads,
    }


@dataclass(frozen=True)
class StepParts:
    """The parts of a run that a training step uses."""

    forward_backward: Callable[..., Any]
    """Runs the micro-batches. On a rank that has all layers its loop is `one_after_the_other`, in
    megatron.core.pipeline_parallel.schedules."""
    forward_step: Callable[..., Any]
    model: Sequence[Any]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    timers: Timers | None = None
    """Measure the schedule's parts, if it takes them, and the update (`optimizer`, level 1)."""
    results: RerunStateMachine | None = None
    """Checks the results that the loss function validates, which waits for the device."""
    probe: GradientProbe | None = None
    update: Callable[[Tensor], StepUpdate] | None = None
    """Replaces `optimizer.step_on_device`."""
    judge: Callable[[Sequence[Mapping[str, Tensor]]], SpikeVerdict] | None = None
    """Decides whether the loss is a spike, before the update."""


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a training step."""

    num_microbatches: int
    micro_batch_size: int
    seq_length: int
    global_batch_size: int
    decoder_seq_length: int | None = None

    @classmethod
    def of_run(cls, config: PretrainConfig, num_microbatches: int, global_batch_size: int) -> "StepSizes":
        """Returns the sizes by the flags of a run, for a step of so many samples."""
        size, length = config.training.micro_batch_size, config.data.seq_length or 0
        return cls(num_microbatches, size, length, global_batch_size, config.decoder_seq_length)

    def for_schedule(self) -> dict[str, int]:
        """Returns the sizes that a function of `get_forward_backward_func` takes."""
        sizes = dataclasses.asdict(self)
        del sizes["global_batch_size"]
        return {name: size for name, size in sizes.items() if size is not None}


def run_step(
    parts: StepParts, sizes: StepSizes, data_iterator: Any, schedule_arguments: Mapping[str, Any]
) -> StepResult:
    """Runs one training step without waiting for the device: gradients of the global batch, update, schedule.

    If a loss or gradient is not finite on one rank, all ranks skip the update and do not advance the schedule.
    `schedule_arguments` are further arguments of `parts.forward_backward`.
    """
    model, optimizer, scheduler, results = parts.model, parts.optimizer, parts.scheduler, parts.results
    timers = {"timers": parts.timers} if "timers" in Keywords.of(parts.forward_backward) else {}
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()

    def compute() -> Sequence[Mapping[str, Tensor]]:
        step_reports = parts.forward_backward(  # forward and backward of each micro-batch
            forward_step_func=parts.forward_step,
            data_iterator=data_iterator,
            model=list(model),
            forward_only=False,
            **sizes.for_schedule(),
            **schedule_arguments,
            **timers,
        )
        if results is not None:
            results.validate_losses(step_reports)
        return step_reports

    if results is None or results.checks_results is False:
        reports = compute()
    else:
        reports = results.step(compute, mark_step_start(model, optimizer, step_data_of(data_iterator), parts.probe))
    learning_rate, decoupled = scheduler.learning_rate, scheduler.decoupled_learning_rate
    loss_scale = optimizer.get_loss_scale().clone()
    spike = None if parts.judge is None else parts.judge(reports)
    with timed(parts.timers, "optimizer", 1):
        updated = (parts.update or optimizer.step_on_device)(losses_are_finite(reports, loss_scale.device))
    scheduler.advance_on_device(updated.update_applied, increment=sizes.global_batch_size)
    return StepResult(
        reports,
        updated,
        learning_rate,
        loss_scale,
        sizes.global_batch_size,
        decoupled_learning_rate=decoupled,
        spike=spike,
    )


def norm_of_weights(trainer: Trainer) -> Tensor | None:
    """Returns the 2-norm of all weights after the update if --log-params-norm is given and a log line is due, else
    None."""
    logging = trainer.config.logging
    if not logging.log_params_norm or (trainer.state.iteration + 1) % logging.log_interval:
        return None
    units = [unit for chunk in trainer.model for unit in chunk.units]
    return weight_norm(units, trainer.environment.groups, trainer.model[0])


def losses_are_finite(reports: Sequence[Mapping[str, Tensor]], device: torch.device) -> Tensor:
    """Returns a bool scalar on the device: whether all losses that this rank reports are finite. True if it reports
    none."""
    values = [value.detach().reshape(-1).float() for report in reports for value in report.values()]
    if not values:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.isfinite(torch.cat(values)).all()
