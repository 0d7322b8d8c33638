"""--use-checkpoint-args: takes the model's flags from the command line that a checkpoint has recorded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.declarations.config_fields import value_text
from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint
from megatron.core.exceptions import UserError
from megatron.training.config.command_line import CommandLine, read_command_line
from megatron.training.config.flag_table import Flag, flag_table, spelling_of

_TOKENIZER = "tokenizer"
_MODEL = ("model", "attention", "positions", "mixture of experts", "multi-latent attention", "token mixers")
_GROUPS = (*_MODEL, _TOKENIZER)
"""Sections of the flags that define the model and the meaning of its ids."""
_OTHER_FIELDS = ("seq_length",)
"""Fields of other sections that are taken too."""
_NOT_TAKEN = (
    "attention_backend",
    "cp_comm_type",
    "moe_token_dispatcher_type",
    "moe_local_token_overlap",
    "moe_balanced_expert_placement",
    "moe_dispatcher_transport",
    "moe_grouped_gemm",
)
"""Fields of these sections that do not change the computed function, and may not go with the run's layout."""


def take_checkpoint_args(line: CommandLine, defaults: Mapping[str, Any] | None = None) -> None:
    """Replaces the model's flags by those of a checkpoint, as Megatron-LM does. Does nothing without
    --use-checkpoint-args.

    Flags of the tokenizer, whose files may have moved, are taken only where the command line does not give them. The
    checkpoint is that of --load (and --ckpt-step), otherwise that of --pretrained-checkpoint. Warnings list the flags
    that are taken and replaced, or say that there is no checkpoint yet. An unreadable checkpoint adds a problem; so
    does a missing one if neither the command line nor `defaults`, those of the script, have a hidden size. Without
    `defaults` the script may still set it.
    """
    if not line.values["use_checkpoint_args"]:
        return
    folders = [(line.values["load"], line.values["ckpt_step"]), (line.values["pretrained_checkpoint"], None)]
    try:
        for root, step in folders:
            checkpoint = None if root is None else find_checkpoint(Path(root), step, log=lambda sentence: None)
            if checkpoint is not None:
                take_model_flags(
                    line,
                    list(checkpoint.manifest.config.get("command_line", [])),
                    str(checkpoint.folder),
                    "--use-checkpoint-args",
                )
                return
    except UserError as error:
        line.problems.append(f"--use-checkpoint-args: {error}")
        return
    named = " or ".join(str(root) for root, _ in folders if root is not None)
    if not named:
        line.problems.append("--use-checkpoint-args needs a checkpoint: --load or --pretrained-checkpoint names one")
    elif defaults is not None and "hidden_size" not in {*line.given, *defaults}:
        line.problems.append(
            f"--use-checkpoint-args: no checkpoint in {named}, and the command line does not describe the model"
        )
    else:
        line.warnings.append(f"--use-checkpoint-args: no checkpoint in {named} yet: the given flags are used")


def take_model_flags(line: CommandLine, words: list[str], folder: str, by: str) -> None:
    """Replaces the model's flags by those among `words`, and adds those of the tokenizer that are not given.

    Warnings, which begin with the flag `by`, list what is taken from `folder` and replaced.
    """
    recorded = read_command_line(words, ignore_unknown_args=True)
    line.problems += [f"{by}: {folder}: {problem}" for problem in recorded.problems]
    taken, replaced = [], []
    for field, flag in flag_table().items():
        if field not in recorded.given or not _is_of_model(flag):
            continue
        value = recorded.values[field]
        if field in line.given:
            if flag.group == _TOKENIZER or field in _OTHER_FIELDS or line.values[field] == value:
                continue
            replaced.append(f"{spelling_of(field)} {value_text(line.values[field])} with {value_text(value)}")
        line.values[field] = value
        line.given[field] = recorded.given[field]
        line.broken.discard(field)
        taken.append(spelling_of(field))
    line.warnings.append(f"{by}: {len(taken)} flags from {folder}: {' '.join(taken)}")
    if replaced:
        line.warnings.append(f"{by} replaces {', '.join(replaced)}")


def _is_of_model(flag: Flag) -> bool:
    return (flag.group in _GROUPS and flag.field not in _NOT_TAKEN) or flag.field in _OTHER_FIELDS
