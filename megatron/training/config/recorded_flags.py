"""The flags that a checkpoint records.

Anybody may have written a checkpoint. Its words are parsed, but not acted on: they print no help, read no config file
and import nothing. `Flag.from_checkpoint` says which of their values a program may take.
"""

from collections.abc import Callable, Mapping, Sequence

from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import without_stages
from megatron.training.config.command_line import CommandLine, split_words, take_flag
from megatron.training.config.flag_table import Flag, flag_table, flags_by_spelling
from megatron.training.config.retired import Occurrence, translate_all

_GROUPS_OF_RUN = ("number formats, seed and ranks", "data parallel", "pipeline stages", "memory", "fp8 and fp4")
_FIELDS_OF_RUN = (
    *("attention_backend", "cp_comm_type"),
    *("moe_token_dispatcher_type", "moe_shared_expert_overlap", "moe_layer_recompute"),
    *("encoder_pipeline_model_parallel_size", "encoder_tensor_model_parallel_size"),
    *("moe_use_upcycling", "moe_upcycling_granularity"),
    *("moe_per_layer_logging", "moe_enable_routing_replay", "log_max_attention_logit"),
)
"""Flags of other sections."""


def is_of_run(flag: Flag) -> bool:
    """Whether the flag says how a run begins, divides, computes or logs its model, not which model it is."""
    return flag.group in _GROUPS_OF_RUN or flag.field in _FIELDS_OF_RUN


def recorded_words(described: Mapping[str, object]) -> list[str]:
    """Returns the words of the command line in a checkpoint's description; none if it has none. Raises UserError if
    they are something else than words."""
    words = described.get("command_line", [])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError("the checkpoint's command_line is not a list of words")
    return words


def recorded_flags(words: Sequence[str], wanted: Callable[[Flag], bool]) -> list[tuple[Flag, Occurrence]]:
    """Returns the flags among the words of a checkpoint that `wanted` accepts. Flags of older releases have their
    names of today; unknown flags are left out."""
    table = flags_by_spelling()
    occurrences, _ = translate_all(split_words(words)[0])
    known = [(table[one.spelling], one) for one in occurrences if one.spelling in table]
    return [(flag, occurrence) for flag, occurrence in known if wanted(flag)]


def flags_of_model(words: Sequence[str], wanted: Callable[[Flag], bool]) -> list[tuple[Flag, Occurrence]]:
    """Returns the flags among the words of a checkpoint that may be taken and that `wanted` accepts. The ends of
    pipeline stages in a pattern of layers are left out: they are the layout of the run that wrote it."""
    return [
        (flag, _without_stages(occurrence) if flag.field == "hybrid_layer_pattern" else occurrence)
        for flag, occurrence in recorded_flags(words, wanted)
        if flag.from_checkpoint
    ]


def _without_stages(occurrence: Occurrence) -> Occurrence:
    return Occurrence(occurrence.spelling, tuple(without_stages(word) or "" for word in occurrence.words))


def read_recorded(words: Sequence[str], wanted: Callable[[Flag], bool] = lambda flag: True) -> CommandLine:
    """Returns the values of the flags among the words of a checkpoint that `wanted` accepts; other fields have their
    defaults."""
    line = CommandLine({name: flag.default for name, flag in flag_table().items()})
    for flag, occurrence in recorded_flags(words, wanted):
        take_flag(line, flag, occurrence)
    return line


def words_of_spec(spec: Sequence[str] | None) -> list[str]:
    """Returns the words that give this --spec; none for None."""
    return [] if spec is None else ["--spec", *spec]


def check_spec(words: Sequence[str], given: bool) -> None:
    """Raises UserError if the words of a checkpoint have a --spec, and the command line has none (`given`). A spec is
    code, which is only taken from the command line."""
    spec = read_recorded(words, lambda flag: flag.field == "spec").values["spec"]
    if spec and spec != ["local"] and not given:
        raise UserError(
            f"the model was made with --spec {' '.join(spec)}, which is code, and no code is taken from a checkpoint; "
            "give this --spec again if you trust the module"
        )
