"""`pretrain`: trains the model that the command line describes. It hands to the run what the run may not import:
Megatron-LM's functions for scripts, Hugging Face folders, the dry run, and the explanations of failures."""

import functools
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from megatron.conversion.hub_run import take_hub_args, with_hub_folders
from megatron.core.declarations.enums import ModelType
from megatron.core.exceptions import UserError
from megatron.diagnosis.device_memory import explains_lack_of_gpu_memory
from megatron.diagnosis.dry_run.report import print_dry_run
from megatron.diagnosis.non_finite import dump_and_search
from megatron.diagnosis.planning.topology import topology_lines
from megatron.facades.argument_utils import PretrainConfigContainer
from megatron.facades.arguments import check_can_train
from megatron.facades.global_vars import published
from megatron.facades.script_providers import providers_of_user_script, refuse, warn_unused
from megatron.training.adapters import with_adapters
from megatron.training.arguments import config_of_command_line
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.hooks.exit import ExitDecision
from megatron.training.launch.errors import exit_with_error_of_rank
from megatron.training.loop import FailureHelp, run_pretraining
from megatron.training.providers import NonLossFunctions, Providers


def _pretrain(
    train_valid_test_dataset_provider: Providers | Callable[..., Sequence[Any]],
    model_provider: Callable[..., nn.Module] | None = None,
    model_type: ModelType = ModelType.encoder_or_decoder,
    forward_step_func: Callable[..., Any] | None = None,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: Mapping[str, object] | None = None,
    get_embedding_ranks: Callable[..., Any] | None = None,
    get_position_embedding_ranks: Callable[..., Any] | None = None,
    non_loss_data_func: Callable[..., Any] | None = None,
    store: object = None,
    inprocess_call_wrapper: object = None,
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
    _refuse_given(store=store, inprocess_call_wrapper=inprocess_call_wrapper)
    ranks = {"get_embedding_ranks": get_embedding_ranks, "get_position_embedding_ranks": get_position_embedding_ranks}
    warn_unused("pretrain", ranks)
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
    _run(config, providers, started)


def _pretrain_configured(
    cfg_container: PretrainConfigContainer,
    train_valid_test_dataset_provider: Callable[..., Sequence[object]],
    model_type: ModelType = ModelType.encoder_or_decoder,
    forward_step_func: Callable[..., Any] | None = None,
    model_provider: Callable[..., nn.Module] | None = None,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    get_embedding_ranks: Callable[..., object] | None = None,
    get_position_embedding_ranks: Callable[..., Any] | None = None,
    non_loss_data_func: Callable[..., Any] | None = None,
    store: Any = None,
    inprocess_call_wrapper: Any = None,
    p2p_communicator: Any = None,
    pg_collection: object = None,
    skip_model_parallel_init: bool = False,
) -> None:
    """`pretrain` of releases from 0.18 on, whose settings come as a record instead of the command line."""
    started = time.monotonic()
    _refuse_given(
        store=store,
        inprocess_call_wrapper=inprocess_call_wrapper,
        p2p_communicator=p2p_communicator,
        pg_collection=pg_collection,
        skip_model_parallel_init=skip_model_parallel_init or None,
    )
    ranks = {"get_embedding_ranks": get_embedding_ranks, "get_position_embedding_ranks": get_position_embedding_ranks}
    warn_unused("pretrain", ranks)
    if forward_step_func is None:
        raise UserError("pretrain: forward_step_func is missing")
    config = cfg_container.config
    if not config.training.dry_run:
        check_can_train(config)
    non_loss = non_loss_functions(non_loss_data_func, process_non_loss_data_func, config)
    build = model_provider or cfg_container.model_provider()
    providers = providers_of_user_script(train_valid_test_dataset_provider, build, forward_step_func, non_loss=non_loss)
    _run(config, providers, started)


def _refuse_given(**arguments: object) -> None:
    refuse("pretrain", {name: value is not None for name, value in arguments.items()})


@functools.wraps(_pretrain)
def pretrain(*args: Any, **kwargs: Any) -> None:
    """Trains a model: with the settings of the command line (`_pretrain`), or with those of a record that comes first
    (`_pretrain_configured`), as in scripts of Megatron-LM from release 0.18 on."""
    if "cfg_container" in kwargs or (args and isinstance(args[0], PretrainConfigContainer)):
        return _pretrain_configured(*args, **kwargs)
    return _pretrain(*args, **kwargs)


def _run(config: PretrainConfig, providers: Providers, started: float) -> None:
    """Trains, or prints the dry run. Exits as `pretrain` says."""
    if config.training.dry_run:
        return print_dry_run(config, with_adapters(config, published(providers)))
    if os.environ.get("RANK", "0") == "0":
        print("".join(f"{line}\n" for line in topology_lines(config, LaunchEnvironment.of_this_process())), end="")
    try:
        decision = pretrain_config(config, providers, started)
    except UserError as error:
        exit_with_error_of_rank(error)
    if decision is not None and decision.exit_code:
        raise SystemExit(decision.exit_code)


def pretrain_config(config: PretrainConfig, providers: Providers, started: float) -> ExitDecision | None:
    """Runs what `pretrain` runs once the command line is read. Returns the decision of an early exit, or None."""
    providers = with_adapters(config, with_hub_folders(config, published(providers)))
    return run_pretraining(config, providers, started, FailureHelp(explains_lack_of_gpu_memory, dump_and_search))


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


def gpt_entry_script() -> ModuleType:
    """Returns pretrain_gpt.py, whose functions build model, data and forward step. Raises UserError if it is neither
    installed with the package nor on the path."""
    try:
        return importlib.import_module("pretrain_gpt")
    except ImportError:
        raise UserError(
            "pretrain_gpt.py is not found; it is beside the package: put that folder on PYTHONPATH"
        ) from None
