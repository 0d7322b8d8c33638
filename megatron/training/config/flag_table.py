"""All flags of the app, read off the fields of the config dataclasses."""

import dataclasses
import enum
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.config_fields import FlagDeclaration, declaration_of, field_docstrings, value_text
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.config.architecture import ArchitectureConfig
from megatron.core.transformer.config.attention import AttentionConfig
from megatron.core.transformer.config.fusions import FusionConfig
from megatron.core.transformer.config.inference import InferenceConfig
from megatron.core.transformer.config.initialization import InitializationConfig
from megatron.core.transformer.config.latent_attention import LatentAttentionConfig
from megatron.core.transformer.config.low_precision import LowPrecisionConfig
from megatron.core.transformer.config.memory import MemoryConfig
from megatron.core.transformer.config.moe import MoEConfig
from megatron.core.transformer.config.positions import PositionConfig
from megatron.core.transformer.config.router import RouterConfig
from megatron.core.transformer.config.stages import StageConfig
from megatron.core.transformer.config.token_mixers import TokenMixerConfig
from megatron.training.config.app_defaults import APP_DEFAULTS
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig
from megatron.training.config.evaluation import EvaluationConfig
from megatron.training.config.logging import LoggingConfig
from megatron.training.config.model import ModelConfig
from megatron.training.config.parallel import ParallelConfig
from megatron.training.config.resilience import ResilienceConfig
from megatron.training.config.schedule import ScheduleConfig
from megatron.training.config.tokenizer import TokenizerConfig
from megatron.training.config.training import TrainingConfig

GROUPS: dict[str, tuple[type, ...]] = {
    "model": (ArchitectureConfig, ModelConfig),
    "attention": (AttentionConfig,),
    "positions": (PositionConfig,),
    "initial weights": (InitializationConfig,),
    "data": (DataConfig,),
    "tokenizer": (TokenizerConfig,),
    "training": (TrainingConfig,),
    "optimizer": (OptimizerConfig,),
    "learning rate and weight decay": (ScheduleConfig,),
    "evaluation": (EvaluationConfig,),
    "checkpoints": (CheckpointConfig,),
    "logging": (LoggingConfig,),
    "faults and signals": (ResilienceConfig,),
    "number formats, seed and ranks": (ModelParallelConfig, ParallelConfig),
    "data parallel": (DistributedDataParallelConfig,),
    "memory": (MemoryConfig,),
    "kernels": (FusionConfig,),
    "fp8 and fp4": (LowPrecisionConfig,),
    "mixture of experts": (MoEConfig, RouterConfig),
    "multi-latent attention": (LatentAttentionConfig,),
    "pipeline stages": (StageConfig,),
    "token mixers": (TokenMixerConfig,),
    "generation": (InferenceConfig,),
}
"""Sections of --help, and the dataclasses whose own fields stand in each."""


@dataclass(frozen=True)
class Flag:
    """One flag, or the two spellings of a switch."""

    field: str
    """Name of the dataclass field, and of the attribute of `get_args()`."""
    spellings: tuple[str, ...]
    """Flags that set it; the first is the one we speak of."""
    default: Any
    """The app's default."""
    parse: Callable[[str], Any]
    """One word of the command line to a value. Raises ValueError with what would work."""
    nargs: str | int | None
    """None: one word; 0: none (a switch); a number, "+" or "*": a list."""
    choices: tuple[str, ...] | None
    switch: dict[str, bool] | None
    """For a bool: what each spelling sets it to."""
    one_or_list: bool
    """A single word stands for itself, several for a list."""
    help: str
    group: str
    declaration: FlagDeclaration

    @property
    def spelling(self) -> str:
        return self.spellings[0]


@functools.cache
def flag_table() -> dict[str, Flag]:
    """Every flag by field name, in the order of --help."""
    table: dict[str, Flag] = {}
    for group, classes in GROUPS.items():
        for config_class in classes:
            for flag in flags_of(config_class, group):
                assert flag.field not in table, f"two dataclasses state --{flag.field}"
                table[flag.field] = flag
    return table


@functools.cache
def flags_by_spelling() -> dict[str, Flag]:
    """Every flag by each way to write it."""
    found: dict[str, Flag] = {}
    for flag in flag_table().values():
        for spelling in flag.spellings:
            assert spelling not in found, f"two fields are written {spelling}"
            found[spelling] = flag
    return found


def parent_of(flag: Flag) -> tuple[Flag, str] | None:
    """The flag without which this one is never looked at, and the value that it must have ("" for any but its
    default); None for a flag that stands by itself."""
    name, _, value = (flag.declaration.only_with or "").partition("=")
    parent = flag_table().get(name)
    return (parent, value) if parent is not None else None


def is_inert(flag: Flag) -> bool:
    """Whether a flag is accepted and changes nothing: by itself, or because it goes with such a flag."""
    parent = parent_of(flag)
    return flag.declaration.no_effect is not None or (parent is not None and is_inert(parent[0]))


def is_to_come(flag: Flag) -> bool:
    """Whether a feature is still to come: only the default works, or only what goes with such a flag."""
    supported = flag.declaration.supported
    if supported is not None and len(supported) == 1:
        return True
    parent = parent_of(flag)
    return parent is not None and (is_to_come(parent[0]) or not can_be(parent[0], parent[1]))


def can_be(flag: Flag, word: str) -> bool:
    """Whether this word works as a value so far."""
    supported = flag.declaration.supported
    return not word or supported is None or word in [value_text(value) for value in supported]


def spelling_of(field: str) -> str:
    """How a field is written on the command line."""
    flag = flag_table().get(_SAID_BY.get(field, field))
    return flag.spelling if flag is not None else field


_SAID_BY = {"virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank"}
"""Fields without a flag of their own, and the flag that they are set by."""


def flags_of(config_class: type, group: str) -> list[Flag]:
    """The flags that a dataclass states itself, its bases aside."""
    own = inspect.get_annotations(config_class)
    annotations = typing.get_type_hints(config_class)
    help_texts = field_docstrings(config_class)
    return [
        _flag_of(field, annotations[field.name], help_texts.get(field.name, ""), group)
        for field in dataclasses.fields(config_class)
        if field.name in own and declaration_of(field).exposed
    ]


def _flag_of(field: "dataclasses.Field[Any]", annotation: Any, help_text: str, group: str) -> Flag:
    declaration = declaration_of(field)
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    elif default is dataclasses.MISSING:  # a run must have it: given, derived, or a problem
        default = None
    default = APP_DEFAULTS.get(field.name, default)
    words = _word_type(annotation)
    if declaration.parse is not None:
        words = _Words(str, declaration.parse)
    elif declaration.words is not None:
        words = _Words(str, _choice(declaration.words), tuple(declaration.words))
    switch = _switch(field.name, declaration, bool(default)) if words.kind is bool else None
    nargs = declaration.nargs if switch is None else 0
    if nargs is None and words.is_list:
        nargs = "+"
    return Flag(
        field=field.name,
        spellings=(declaration.on or _dashed(field.name), *declaration.aliases) if switch is None else tuple(switch),
        default=default,
        parse=words.parse,
        nargs=nargs,
        choices=words.choices,
        switch=switch,
        one_or_list=nargs == "+" and _takes_one_or_list(annotation),
        help=help_text,
        group=declaration.group or group,
        declaration=declaration,
    )


def _switch(name: str, declaration: FlagDeclaration, default: bool) -> dict[str, bool]:
    """A bool that is true by default is given one flag, which turns it off; one that is false has a flag to turn it on,
    and another to turn it off if `off` is declared. Aliases go with the first."""
    if declaration.off is not None and default is True:
        return dict.fromkeys((declaration.off, *declaration.aliases), False)
    switch = dict.fromkeys((declaration.on or _dashed(name), *declaration.aliases), True)
    if declaration.off is not None:
        switch[declaration.off] = False
    return switch


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


# ---------------------------------------------------------------------------------------------------------------------
# From an annotation to what a word of the command line may be


@dataclass(frozen=True)
class _Words:
    kind: type
    parse: Callable[[str], Any]
    choices: tuple[str, ...] | None = None
    is_list: bool = False


def _word_type(annotation: Any) -> _Words:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        members = [_word_type(argument) for argument in arguments if argument is not type(None)]
        return members[-1]  # `str | list[str]`: the list, one word of which may stand alone
    if origin is Literal:
        return _Words(type(arguments[0]), _choice({str(word): word for word in arguments}), tuple(map(str, arguments)))
    if origin is list:
        return dataclasses.replace(_word_type(arguments[0]), is_list=True)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _Words(
            annotation, _choice({member.name: member for member in annotation}), tuple(annotation.__members__)
        )
    parsers: dict[Any, Callable[[str], Any]] = {int: whole_number, float: number, str: str}
    return _Words(annotation if isinstance(annotation, type) else str, parsers.get(annotation, str))


def _takes_one_or_list(annotation: Any) -> bool:
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    return len(members) == 2 and typing.get_origin(members[1]) is list


def _choice(values: typing.Mapping[str, Any]) -> Callable[[str], Any]:
    def parse(word: str) -> Any:
        if word not in values:
            raise ValueError(f"choose from {', '.join(values)}")
        return values[word]

    return parse


def whole_number(word: str) -> int:
    """An integer; what looks like another number is told how to be written."""
    try:
        return int(word)
    except ValueError:
        pass
    try:
        value = float(word)
    except ValueError:
        raise ValueError("expected a whole number") from None
    near = f"; {round(value)} works" if math.isfinite(value) and abs(value) < 1e18 else ""
    raise ValueError(f"expected a whole number{near}")


def number(word: str) -> float:
    """A finite decimal number."""
    try:
        value = float(word)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value
