"""The command line of a run. Megatron-LM's functions for user scripts, of the same path, are in megatron.facades."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.exceptions import UserError
from megatron.homes import lazy_names
from megatron.training.checkpoint_args import take_checkpoint_args
from megatron.training.config.command_line import CommandLine, ExtraArgsProvider, read_command_line
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolution import ConfigurationError, resolve
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.inspection.run_description import ARCHITECTURE, OF_ADAPTERS, architecture_differences
from megatron.training.launch.errors import exit_with_problems
from megatron.training.launch.launcher_variables import take_ranks_of_launcher


def config_of_command_line(
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, object] | None = None,
    ignore_unknown_args: bool = False,
    take_flags: Callable[[CommandLine], None] | None = None,
) -> PretrainConfig:
    """Returns the settings of this process's command line. `take_flags` may change them before they are checked.

    After mistakes, prints all of them to stderr, one line each, and exits with code 2. After --help, prints the help
    and exits with code 0.
    """
    take_ranks()
    try:
        return configure(sys.argv[1:], extra_args_provider, args_defaults, ignore_unknown_args, take_flags=take_flags)
    except ConfigurationError as error:
        exit_with_problems(error)


def take_ranks() -> None:
    """Takes this process's rank from its launcher. After a mistake, prints it to stderr and exits with code 2."""
    try:
        take_ranks_of_launcher()
    except UserError as error:
        exit_with_problems(error)


def configure(
    argv: Sequence[str],
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
    launch_environment: LaunchEnvironment | None = None,
    take_flags: Callable[[CommandLine], None] | None = None,
) -> PretrainConfig:
    """Returns the settings of a command line given as words. Raises ConfigurationError with all mistakes."""
    line = read_command_line(argv, extra_args_provider, ignore_unknown_args)
    if take_flags is not None:
        take_flags(line)
    described = take_checkpoint_args(line, args_defaults or {})
    config = resolve(line, args_defaults, launch_environment)
    if described is not None:
        _check_taken_model(config, described)
    return config


def _check_taken_model(config: PretrainConfig, described: Mapping[str, Any]) -> None:
    """Raises ConfigurationError if given flags make another model than that of --use-checkpoint-args, whichever flags
    say so. Fields that the checkpoint does not know yet are left out."""
    known = described.get("architecture", {})
    unknown = [name for name in ARCHITECTURE if name not in known]
    # Adapters are not taken: the model that they are made for has none.
    differences = architecture_differences(config, described, leave_out=[*unknown, *OF_ADAPTERS])
    if differences:
        raise ConfigurationError(
            f"--use-checkpoint-args: {difference}; leave the flag out to take the checkpoint's value, or leave "
            "--use-checkpoint-args out and give --finetune to change the model on purpose"
            for difference in differences
        )


__getattr__ = lazy_names(
    __name__,
    {
        "_add_data_args": "megatron.facades.accelerate_plugin",
        "_add_logging_args": "megatron.facades.accelerate_plugin",
        "_add_validation_args": "megatron.facades.accelerate_plugin",
        "Arguments": "megatron.facades.arguments",
        "core_transformer_config_from_args": "megatron.facades.arguments",
        "parse_and_validate_args": "megatron.facades.argument_utils",
        "parse_args": "megatron.facades.arguments",
        "validate_args": "megatron.facades.arguments",
    },
)
