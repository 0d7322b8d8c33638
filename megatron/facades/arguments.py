"""Megatron-LM's functions for the arguments of a user script."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.declarations.config_fields import describe_problem
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.facades.plugin_arguments import is_of_plugin, take_plugin_values
from megatron.training.arguments import take_ranks
from megatron.training.checkpoint_args import take_checkpoint_args
from megatron.training.config.checks import missing_schedule
from megatron.training.config.command_line import CommandLine, ExtraArgsProvider, read_command_line
from megatron.training.config.flag_table import spelling_of
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolution import (
    APP_SWITCHES,
    ConfigurationError,
    field_of_name,
    resolve,
    transformer_fields,
)
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.launch.errors import exit_with_problems


class Arguments(argparse.Namespace):
    """The result of `parse_args`: values by Megatron-LM's names, which a script may change until `validate_args`.

    A value can be read and set by the field's name and by the flag's: `args.num_moe_experts` is `args.num_experts`.
    """

    def __init__(self, line: CommandLine) -> None:
        super().__init__(**line.values, **line.extra)
        object.__setattr__(self, "_line", line)
        object.__setattr__(self, "config", None)

    def __getattr__(self, name: str) -> Any:  # only called for missing attributes
        field = field_of_name(name) if not name.startswith("_") else None
        if field is None or field == name:
            raise AttributeError(f"the arguments have no {name!r}")
        return getattr(self, field)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, field_of_name(name) or name, value)


def parse_args(
    extra_args_provider: ExtraArgsProvider | None = None,
    ignore_unknown_args: bool = False,
    *,
    take_flags: Callable[[CommandLine], None] | None = None,
) -> Arguments:
    """Returns the command line as a namespace. Values are parsed, but not derived or checked against each other.

    `extra_args_provider(parser)` adds arguments and returns the parser. Exits with code 2 if a flag is unknown
    (unless `ignore_unknown_args`) or a value cannot be parsed. `take_flags`, our own keyword, may change the values.
    """
    take_ranks()
    line = read_command_line(sys.argv[1:], extra_args_provider, ignore_unknown_args)
    if take_flags is not None:
        take_flags(line)
    take_checkpoint_args(line)
    if line.problems:
        exit_with_problems(ConfigurationError(line.problems))
    arguments = Arguments(line)
    arguments.rank = int(os.environ.get("RANK", 0))
    arguments.world_size = int(os.environ.get("WORLD_SIZE", 1))
    return arguments


OF_SCRIPT = {"datasets_of_script": True, "loop_of_script": True}
"""What is known about a script that calls `validate_args` or `initialize_megatron`."""


def check_can_train(config: PretrainConfig) -> None:
    """Raises ConfigurationError if the learning rate or the length of the run is missing."""
    training, settings = config.training, config.optimizer
    if not config.evaluation.skip_train:
        problems = missing_schedule(settings.lr, training.train_iters or training.train_samples or None)
        named = [describe_problem(problem, argparse.Namespace(**config.flat()), spelling_of) for problem in problems]
        if named:
            raise ConfigurationError(named)


def validate_args(args: Arguments, defaults: Mapping[str, Any] | None = None) -> Arguments:
    """Checks the arguments and fills in derived values, in place. `args.config` becomes the frozen PretrainConfig.

    `defaults` are used where a value is None. The script may build its datasets itself, so no flag of data is required.
    It may only load a model: `check_can_train` asks for --lr and the length of the run when it makes an optimizer.
    After mistakes, prints all of them and exits with code 2.
    """
    if is_of_plugin(args):
        take_plugin_values(args)
    defaults = {**(defaults or {}), **OF_SCRIPT}
    before = args._line
    values = {name: getattr(args, name) for name in before.values}
    changed = {name for name, value in values.items() if value != before.values[name]}
    given = {name: flag for name, flag in before.given.items() if name not in changed}
    line = dataclasses.replace(before, values=values, given=given, script=before.script | changed)
    launch_environment = dataclasses.replace(LaunchEnvironment.of_this_process(), world_size=args.world_size)
    try:
        config = resolve(line, defaults, launch_environment)
    except ConfigurationError as error:
        exit_with_problems(error)
    for name, value in (config.flat() | dict(config.extra)).items():
        setattr(args, name, value)
    object.__setattr__(args, "config", config)
    return args


def core_transformer_config_from_args(
    args: Any, config_class: type[TransformerConfig] | None = None
) -> TransformerConfig:
    """Returns a new transformer config of `config_class` from arguments (a namespace, or the result of `get_args()`).

    Fields that the arguments lack keep the library's defaults. Raises UserError if a value is impossible.
    """
    if config_class is None:
        mla = getattr(args, "multi_latent_attention", False)
        config_class = MLATransformerConfig if mla else TransformerConfig
    names = {field.name for field in dataclasses.fields(config_class)} | APP_SWITCHES.keys()
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return config_class(**transformer_fields(config_class, values))
