"""--use-checkpoint-args: the model's flags from what a checkpoint says about the run that wrote it."""

from pathlib import Path

from megatron.core.config_fields import value_text
from megatron.core.dist_checkpointing.choosing import find_checkpoint
from megatron.core.exceptions import UserError
from megatron.training.config.command_line import CommandLine, read_command_line
from megatron.training.config.flag_table import Flag, flag_table, spelling_of

_TOKENIZER = "tokenizer"
_MODEL = ("model", "attention", "positions", "mixture of experts", "multi-latent attention", "token mixers")
_GROUPS = (*_MODEL, _TOKENIZER)
"""Sections of flags that say what the model is and what its ids mean."""
_AND_BESIDE_THEM = ("seq_length",)
_NOT_OF_THE_MODEL = ("attention_backend", "cp_comm_type", "moe_token_dispatcher_type", "moe_grouped_gemm")


def take_checkpoint_args(line: CommandLine) -> None:
    """Replace the flags of the model on a command line by those that a checkpoint remembers, as published; flags of the
    tokenizer, whose files may have moved, are taken where the line gives none. What was replaced is said.

    The checkpoint is that of --load (with --ckpt-step, that one), or else of --pretrained-checkpoint. What cannot be
    read is a problem of the line; where there is no checkpoint yet, a line says so and the flags stand.
    """
    if not line.values["use_checkpoint_args"]:
        return
    places = [(line.values["load"], line.values["ckpt_step"]), (line.values["pretrained_checkpoint"], None)]
    try:
        for root, step in places:
            checkpoint = None if root is None else find_checkpoint(Path(root), step, say=lambda sentence: None)
            if checkpoint is not None:
                _take(line, list(checkpoint.manifest.config.get("command_line", [])), str(checkpoint.folder))
                return
    except UserError as error:
        line.problems.append(f"--use-checkpoint-args: {error}")
        return
    named = " or ".join(str(root) for root, _ in places if root is not None)
    if not named:
        line.problems.append("--use-checkpoint-args needs a checkpoint: --load or --pretrained-checkpoint names one")
    else:
        line.warnings.append(f"--use-checkpoint-args: no checkpoint in {named} yet: the flags that are given stand")


def _take(line: CommandLine, words: list[str], folder: str) -> None:
    remembered = read_command_line(words, ignore_unknown_args=True)
    line.problems += [f"--use-checkpoint-args: {folder}: {problem}" for problem in remembered.problems]
    taken, replaced = [], []
    for field, flag in flag_table().items():
        if field not in remembered.given or not _is_of_model(flag):
            continue
        value = remembered.values[field]
        if field in line.given:
            if flag.group == _TOKENIZER or field in _AND_BESIDE_THEM or line.values[field] == value:
                continue
            replaced.append(f"{spelling_of(field)} {value_text(line.values[field])} by {value_text(value)}")
        line.values[field] = value
        line.given[field] = remembered.given[field]
        line.broken.discard(field)
        taken.append(spelling_of(field))
    line.warnings.append(f"--use-checkpoint-args: {len(taken)} flags from {folder}: {' '.join(taken)}")
    if replaced:
        line.warnings.append(f"--use-checkpoint-args replaces {', '.join(replaced)}")


def _is_of_model(flag: Flag) -> bool:
    return (flag.group in _GROUPS and flag.field not in _NOT_OF_THE_MODEL) or flag.field in _AND_BESIDE_THEM
