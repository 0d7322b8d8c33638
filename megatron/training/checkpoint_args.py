"""--use-checkpoint-args: takes the flags of model and tokenizer from those that a checkpoint has recorded."""

from collections.abc import Mapping
from typing import Any

from megatron.core.declarations.config_fields import value_text
from megatron.core.dist_checkpointing.checkpoint_selection import find_checkpoint
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import without_stages
from megatron.core.utils.store_path import place
from megatron.training.config.command_line import CommandLine, take_flag
from megatron.training.config.flag_table import SAME_THING, Flag, flag_table
from megatron.training.config.recorded_flags import check_spec, flags_of_model, is_of_run, recorded_words
from megatron.training.inspection.run_description import ARCHITECTURE, MODEL_OPTIONS, value_words

_TOKENIZER = "tokenizer"
_MODEL = ("model", "attention", "positions", "mixture of experts", "multi-latent attention", "token mixers")
_GROUPS = (*_MODEL, _TOKENIZER)
"""Sections of the flags that define the model and the meaning of its ids."""
_LENGTHS = ("seq_length", "encoder_seq_length", "decoder_seq_length")
_WIDTH_SCALING = ("use_mup", *(f"mup_{name}" for name in ("base_hidden_size", "embedding_mult", "output_mult")))
_WIDTH_SCALING += ("mup_base_head_dim", "mup_attn_scale_power")
"""Fields of other sections that are taken too: lengths of samples, and the scales of embedding, scores and logits."""
_OF_A_PATTERN = ("num_layers", "encoder_num_layers", "moe_layer_freq")
"""Fields that a given --hybrid-layer-pattern says. The checkpoint of a GPT has them for the GPT's layers."""


def take_checkpoint_args(
    line: CommandLine, defaults: Mapping[str, object] | None = None
) -> Mapping[str, object] | None:
    """Takes the flags of model and tokenizer that are not given from a checkpoint, as Megatron-LM does, and returns
    the checkpoint's description. Does nothing, and returns None, without --use-checkpoint-args.

    The checkpoint is that of --load (and --ckpt-step), otherwise that of --pretrained-checkpoint. Warnings list the
    flags that are taken, or say that there is no checkpoint yet. A given flag of another model adds a problem. So does
    an unreadable checkpoint, and a missing one if neither the command line nor `defaults`, those of the script, have a
    hidden size. Without `defaults` the script may still set it.
    """
    if not line.values["use_checkpoint_args"]:
        return None
    folders = [(line.values["load"], line.values["ckpt_step"]), (line.values["pretrained_checkpoint"], None)]
    try:
        for root, step in folders:
            checkpoint = None if root is None else find_checkpoint(place(root), step, log=lambda sentence: None)
            if checkpoint is not None:
                described = checkpoint.manifest.config
                take_model_flags(line, recorded_words(described), str(checkpoint.folder), "--use-checkpoint-args")
                return described
    except UserError as error:
        nothing_taken(line, f"--use-checkpoint-args: {error}")
        return None
    named = " or ".join(str(root) for root, _ in folders if root is not None)
    if not named:
        nothing_taken(line, "--use-checkpoint-args needs a checkpoint: --load or --pretrained-checkpoint names one")
    elif defaults is not None and "hidden_size" not in {*line.given, *defaults}:
        nothing_taken(
            line, f"--use-checkpoint-args: no checkpoint in {named}, and the command line does not describe the model"
        )
    else:
        line.warnings.append(f"--use-checkpoint-args: no checkpoint in {named} yet: the given flags are used")
    return None


def nothing_taken(line: CommandLine, problem: str) -> None:
    """Adds the problem for which no flags could be taken. Flags that are missing now are not reported."""
    line.problems.append(problem)
    line.broken |= {field for field, flag in flag_table().items() if _is_of_model(flag)} - line.given.keys()


def take_model_flags(line: CommandLine, words: list[str], folder: str, by: str) -> None:
    """Takes the flags of model and tokenizer among `words`, those of a checkpoint, that `line` does not give.

    A given value stays. If it makes another model, a problem names both values. Warnings, which begin with the flag
    `by`, list the flags that are taken from `folder`, and the other values that stay.
    """
    leave_model_of_recipe(line, by)
    try:
        check_spec(words, given="spec" in line.given)
    except UserError as error:
        line.problems.append(f"{by}: {folder}: {error}")
    said = {other for field in line.given for other in SAME_THING.get(field, ())}
    said.update(_OF_A_PATTERN if "hybrid_layer_pattern" in line.given else ())
    recorded = CommandLine({name: flag.default for name, flag in flag_table().items()})
    for flag, occurrence in flags_of_model(words, _is_of_model):
        take_flag(recorded, flag, occurrence)
    line.problems += [f"{by}: {folder}: {problem}" for problem in recorded.problems]
    taken: list[str] = []
    stay: list[str] = []
    for field, flag in flag_table().items():
        if field not in recorded.given or field in said:
            continue
        if field not in line.given:
            line.values[field] = recorded.values[field]
            line.given[field] = recorded.given[field]
            taken.append(flag.spelling)
        elif field not in line.broken and flag.group != _TOKENIZER and field not in _LENGTHS:
            _compare(line, flag, recorded.values, folder, by, stay)
    line.warnings.append(f"{by}: {len(taken)} flags from {folder}: {' '.join(taken)}")
    if stay:
        line.warnings.append(f"{by}: given flags stay: {', '.join(stay)}")


def leave_model_of_recipe(line: CommandLine, by: str) -> None:
    """Leaves out what --recipe says about the model and the tokenizer, since the flag `by` takes them from elsewhere.
    The recipe's optimizer and schedule stay."""
    left = [field for field in line.from_recipe if _is_of_model(flag_table()[field])]
    for field in left:
        line.leave_recipe(field)
    if left:
        line.warnings.append(
            f"--recipe {line.values['recipe']}: {by} describes the model, so only the recipe's "
            "optimizer and schedule are used"
        )


def _compare(
    line: CommandLine, flag: Flag, recorded: Mapping[str, object], folder: str, by: str, stay: list[str]
) -> None:
    """Adds a problem if the given value of a flag makes another model than the recorded one. Adds another difference
    to `stay`."""
    given, theirs = _comparable(flag, line.values), _comparable(flag, recorded)
    if given == theirs:
        return
    of_model = flag.field in (*ARCHITECTURE, *MODEL_OPTIONS)
    if flag.field == "max_position_embeddings":
        of_model = recorded["position_embedding_type"] == "learned_absolute"  # the rows of their embedding
    if of_model:
        line.problems.append(
            f"{by}: {flag.spelling} is {_text(flag, given)} in this run and {_text(flag, theirs)} in {folder}; "
            f"leave {flag.spelling} out to take the latter"
        )
    else:
        stay.append(f"{flag.spelling} {_text(flag, given)} ({_text(flag, theirs)} in {folder})")


def _comparable(flag: Flag, values: Mapping[str, Any]) -> Any:
    value = values[flag.field]
    return without_stages(value) if flag.field == "hybrid_layer_pattern" else value


def _text(flag: Flag, value: object) -> str:
    if flag.switch is not None:
        return value_text(value is flag.switch[flag.spelling])
    return "not set" if value is None else " ".join(value_words(flag, value))


def _is_of_model(flag: Flag) -> bool:
    wanted = flag.group in _GROUPS or flag.field in (*_LENGTHS, *_WIDTH_SCALING)
    return wanted and not is_of_run(flag) and flag.field != "moe_grouped_gemm"  # which may not go with the layout
