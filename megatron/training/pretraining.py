"""A run from its set-up to its end: `run_pretraining` joins the processes, `set_up_and_train` builds the run, trains
and ends it. `megatron.facades.pretrain` reads the command line before.

The training loop is megatron.training.loop.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from megatron.core.exceptions import UserError
from megatron.training import loop
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.sources import prefixes_of_run
from megatron.training.hooks.exit import ExitDecision
from megatron.training.launch.environment import Environment, process_environment
from megatron.training.launch.errors import delay_errors_on_other_ranks
from megatron.training.launch.lease import leases_of_run
from megatron.training.launch.same_inputs import check_same_inputs
from megatron.training.launch.signals import DEFAULT_SIGNALS, SignalWatch
from megatron.training.launch.start_times import startup_line
from megatron.training.providers import Providers
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
                decision = loop.train(trainer)
            if decision is not None:
                failures.examine_early_end(trainer, decision)
            else:
                trainer.finish()
            trainer.close()
    except BaseException as error:
        trainer.close_after_failure(error)
        raise
    return decision
