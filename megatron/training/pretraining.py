"""A whole run, top to bottom: `pretrain` reads the command line, `set_up_and_train` builds the run, trains and ends it.

The training loop is megatron.training.loop.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from megatron.conversion.hub_run import take_hub_args, with_hub_folders
from megatron.core.declarations.enums import ModelType
from megatron.core.exceptions import UserError
from megatron.diagnosis.device_memory import explains_lack_of_gpu_memory
from megatron.diagnosis.dry_run.report import print_dry_run
from megatron.diagnosis.non_finite import dump_and_search
from megatron.training import loop
from megatron.training.arguments import config_of_command_line
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.sources import prefixes_of_run
from megatron.training.hooks.exit import ExitDecision
from megatron.training.launch.environment import Environment, process_environment
from megatron.training.launch.errors import delay_errors_on_other_ranks, exit_with_error_of_rank
from megatron.training.launch.lease import leases_of_run
from megatron.training.launch.same_inputs import check_same_inputs
from megatron.training.launch.signals import DEFAULT_SIGNALS, SignalWatch
from megatron.training.launch.start_times import startup_line
from megatron.training.providers import (
    NonLossFunctions,
    Providers,
    providers_of_user_script,
    warn_unused,
)
from megatron.training.setup.set_up import set_up


def pretrain(
    train_valid_test_dataset_provider: Providers | Callable[..., Sequence[Any]],
    model_provider: Callable[..., nn.Module] | None = None,
    model_type: ModelType = ModelType.encoder_or_decoder,
    forward_step_func: Callable[..., Any] | None = None,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: Callable[..., Any] | None = None,
    get_position_embedding_ranks: Callable[..., Any] | None = None,
    non_loss_data_func: Callable[..., Any] | None = None,
    store: Any = None,
    inprocess_call_wrapper: Any = None,
    *,
    optimizer_provider: Callable[..., Any] | None = None,
) -> None:
    """Trains the model that the command line describes, with the given providers.

    Takes Megatron-LM's provider functions, or a `Providers` alone. `optimizer_provider(model_chunks)` may return any
    torch.optim.Optimizer. Exits with code 2 if the command line is wrong, and with the code of the `ExitDecision` if
    the run ends early because of a non-finite loss. `get_embedding_ranks` and `get_position_embedding_ranks` have no
    effect: the layout of the stages decides which ranks hold an embedding. After each evaluation,
    `non_loss_data_func(model)` collects data that are no losses (without it: `loss_func(output, non_loss_data=True)` of
    each micro-batch), and `process_non_loss_data_func(data, iteration, writer)` takes them on the rank that logs, if
    --tensorboard-dir is given. Raises UserError for arguments that are not supported yet: `store`,
    `inprocess_call_wrapper`.
    """
    started = time.monotonic()
    for name, given in {"store": store, "inprocess_call_wrapper": inprocess_call_wrapper}.items():
        if given is not None:
            raise UserError(f"pretrain({name}=...): not yet")
    warn_unused(
        "pretrain",
        {
            "get_embedding_ranks": get_embedding_ranks,
            "get_position_embedding_ranks": get_position_embedding_ranks,
        },
    )
    if not isinstance(train_valid_test_dataset_provider, Providers):
        args_defaults = {**(args_defaults or {}), "datasets_of_script": True}
    config = config_of_command_line(extra_args_provider, args_defaults, take_flags=take_hub_args)
    if isinstance(train_valid_test_dataset_provider, Providers):
        providers = train_valid_test_dataset_provider
    else:
        assert model_provider is not None and forward_step_func is not None
        providers = providers_of_user_script(
            train_valid_test_dataset_provider,
            model_provider,
            forward_step_func,
            optimizer_provider,
            non_loss_functions(non_loss_data_func, process_non_loss_data_func, config),
        )
    if config.training.dry_run:
        return print_dry_run(config, providers)
    try:
        decision = run_pretraining(config, providers, started)
    except UserError as error:
        exit_with_error_of_rank(error)
    if decision is not None and decision.exit_code:
        raise SystemExit(decision.exit_code)


def non_loss_functions(
    collect: Callable[..., Any] | None, process: Callable[..., Any] | None, config: PretrainConfig
) -> NonLossFunctions | None:
    """Returns the record of a script's functions of non-loss data; None without them. Prints a line on the first rank
    if `process` is given but is not called, because there is no --tensorboard-dir."""
    if process is not None and config.logging.tensorboard_dir is None:
        process = None
        if int(os.environ.get("RANK", 0)) == 0:
            print("process_non_loss_data_func is not called: it takes the writer of --tensorboard-dir", flush=True)
    return None if collect is None and process is None else NonLossFunctions(collect, process)


def run_pretraining(config: PretrainConfig, providers: Providers, started: float) -> ExitDecision | None:
    """Sets up, trains and finishes a run. Returns the decision of an early exit, or None. On return all processes,
    threads and groups that the run started have ended."""
    providers = with_hub_folders(config, providers)
    watched = {*DEFAULT_SIGNALS, config.resilience.exit_signal}
    with (
        SignalWatch(sorted(watched)) as signals,
        process_environment(config, alone=providers.use_torch_distributed) as environment,
    ):
        try:
            check_same_inputs(config, prefixes_of_run)
            with leases_of_run(config, environment):
                return set_up_and_train(config, providers, environment, signals, started)
        except UserError as error:
            if environment.heartbeat is not None:
                environment.heartbeat.report(error)
            delay_errors_on_other_ranks()
            raise


def set_up_and_train(
    config: PretrainConfig, providers: Providers, environment: Environment, signals: SignalWatch, started: float
) -> ExitDecision | None:
    """Runs the part of `run_pretraining` inside the process groups."""
    decision = None
    with explains_lack_of_gpu_memory(config, providers, environment):
        trainer = set_up(config, providers, environment, signals, started)
    if environment.heartbeat is not None:
        environment.heartbeat.call_before_end(trainer.checkpoints.leave_save)
    line = startup_line()
    if line is not None and environment.is_first:
        print(line, flush=True)
    try:
        with signals.training(), explains_lack_of_gpu_memory(config, providers, environment):
            if not config.evaluation.skip_train:
                decision = loop.train(trainer)
            if decision is not None:
                dump_and_search(trainer, decision)
            else:
                trainer.finish()
            trainer.close()
    except BaseException as error:
        trainer.close_after_failure(error)
        raise
    return decision
