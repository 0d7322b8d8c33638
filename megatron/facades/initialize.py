"""Megatron-LM's `initialize_megatron`: starts a run for a script that writes its own training loop.

    initialize_megatron()
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, ModelType.encoder_or_decoder)
    train_data, valid_data, test_data = build_train_valid_test_data_iterators(datasets_provider)
    run_schedule = get_forward_backward_func()
    loss, *_ = train_step(forward_step, train_data, model, optimizer, scheduler, model[0].config, run_schedule)

The functions of such a script are in megatron.facades.training; they act on the run that was started last.
"""

import atexit
import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from megatron.facades.arguments import OF_SCRIPT, Arguments, validate_args
from megatron.facades.dist_signal_handler import DistributedSignalHandler
from megatron.facades.global_vars import PublishedRun, keep_attributes, let_script_count, set_signal_handler
from megatron.facades.script_providers import refuse, warn_unused
from megatron.homes import lazy_names
from megatron.training.arguments import config_of_command_line
from megatron.training.data.sources import prefixes_of_run
from megatron.training.launch.environment import process_environment
from megatron.training.launch.errors import end_process
from megatron.training.launch.lease import leases_of_run
from megatron.training.launch.same_inputs import check_same_inputs
from megatron.training.setup.set_up import start_run

_resources = contextlib.ExitStack()
"""Functions that are called when another run starts or the program ends."""


def _close_at_exit() -> None:
    """Closes the run. After an uncaught exception among several ranks the process ends at once, as `pretrain` does."""
    atexit.unregister(_close_at_exit)
    error: BaseException | None = getattr(sys, "last_value", None)  # set by the interpreter
    failed = error is not None
    several = dist.is_initialized() and dist.get_world_size() > 1
    if error is None:
        _resources.close()
    else:
        with contextlib.suppress(BaseException):  # the interpreter has printed it already
            _resources.__exit__(type(error), error, error.__traceback__)
    if failed and several:
        end_process(1)


atexit.register(_close_at_exit)


def initialize_megatron(
    extra_args_provider: Callable[..., Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
    allow_no_cuda: bool = False,
    skip_mpu_initialization: bool = False,
    get_embedding_ranks: Callable[..., Any] | None = None,
    get_position_embedding_ranks: Callable[..., Any] | None = None,
    parsed_args: Arguments | None = None,
    store: Any = None,
) -> None:
    """Reads the command line, joins the other ranks, makes the process groups and the tokenizer.

    After it `get_args()`, `get_tokenizer()` and the functions of megatron.facades.training work. The process group
    ends with the program. A machine without CUDA is always allowed. A second call starts another run. Exits with code
    2 if the command line is wrong; raises UserError for an argument that is not supported yet.
    """
    refuse("initialize_megatron", {"skip_mpu_initialization": skip_mpu_initialization, "store": store is not None})
    chosen = {"get_embedding_ranks": get_embedding_ranks, "get_position_embedding_ranks": get_position_embedding_ranks}
    warn_unused("initialize_megatron", chosen)
    if parsed_args is None:
        of_script = {**(args_defaults or {}), **OF_SCRIPT}
        config = config_of_command_line(extra_args_provider, of_script, ignore_unknown_args)
    else:
        config = parsed_args.config or validate_args(parsed_args, args_defaults).config
    _resources.close()
    environment = _resources.enter_context(process_environment(config, True, PublishedRun()))
    check_same_inputs(config, prefixes_of_run)
    _resources.enter_context(leases_of_run(config, environment))
    start_run(config, environment)
    if parsed_args is not None:
        keep_attributes(parsed_args)
    let_script_count(True)
    set_signal_handler(None)
    if config.resilience.exit_signal_handler:
        handler = DistributedSignalHandler(config.resilience.exit_signal)
        set_signal_handler(_resources.enter_context(handler))


def close_with_run(close: Callable[[], object]) -> None:
    """Registers `close`, which is called when the run that `initialize_megatron` started ends."""
    _resources.callback(close)


_PLUGIN = "megatron.facades.accelerate_plugin"
__getattr__ = lazy_names(
    __name__,
    {
        "_compile_dependencies": _PLUGIN,
        "_init_autoresume": _PLUGIN,
        "_initialize_distributed": _PLUGIN,
        "_set_random_seed": _PLUGIN,
        "set_jit_fusion_options": _PLUGIN,
        "write_args_to_tensorboard": _PLUGIN,
    },
)
