"""The table of all flags, made from the fields of the config dataclasses."""

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.adapters.config import LoraConfig
from megatron.core.declarations.config_fields import FlagDeclaration, declaration_of, field_docstrings, value_text
from megatron.core.declarations.model_parallel_config import ModelParallelConfig
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.config.architecture import ArchitectureConfig
from megatron.core.transformer.config.attention import AttentionConfig
from megatron.core.transformer.config.fusions import FusionConfig
from megatron.core.transformer.config.heterogeneous import HeterogeneousConfig
from megatron.core.transformer.config.hybrid import HybridConfig
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
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig
from megatron.training.config.flag_words import Words, choice, takes_one_or_list, word_type
from megatron.training.config.hardware import HardwareConfig
from megatron.training.config.log import LoggingConfig, RecordsConfig
from megatron.training.config.model import ACTIVATIONS, ModelConfig
from megatron.training.config.parallel import ParallelConfig
from megatron.training.config.resilience import FaultInjectorConfig, ResilienceConfig
from megatron.training.config.schedule import ScheduleConfig
from megatron.training.config.training import EvaluationConfig, TrainingConfig

GROUPS: dict[str, tuple[type, ...]] = {
    "model": (ArchitectureConfig, ModelConfig),
    "attention": (AttentionConfig,),
    "positions": (PositionConfig,),
    "initial weights": (InitializationConfig,),
    "data": (DataConfig,),
    "tokenizer": (TokenizerConfig,),
    "training": (TrainingConfig,),
    "adapters": (LoraConfig,),
    "optimizer": (OptimizerConfig,),
    "learning rate and weight decay": (ScheduleConfig,),
    "evaluation": (EvaluationConfig,),
    "checkpoints": (CheckpointConfig,),
    "logging": (LoggingConfig,),
    "faults and signals": (ResilienceConfig, FaultInjectorConfig),
    "tensors of single steps": (RecordsConfig,),
    "number formats, seed and ranks": (ModelParallelConfig, ParallelConfig),
    "machines": (HardwareConfig,),
    "data parallel": (DistributedDataParallelConfig,),
    "memory": (MemoryConfig,),
    "kernels": (FusionConfig,),
    "fp8 and fp4": (LowPrecisionConfig,),
    "mixture of experts": (MoEConfig, RouterConfig),
    "multi-latent attention": (LatentAttentionConfig,),
    "pipeline stages": (StageConfig,),
    "token mixers": (TokenMixerConfig, HybridConfig, HeterogeneousConfig),
    "generation": (InferenceConfig,),
}
"""Sections of --help, and the dataclasses whose fields each section lists."""

APP_DEFAULTS: dict[str, Any] = {
    # sizes that the command line must give
    "num_layers": None,
    "hidden_size": None,
    "num_attention_heads": None,
    "num_query_groups": 1,  # read only with --group-query-attention
    # fusions: on
    "gradient_accumulation_fusion": True,
    "masked_softmax_fusion": True,
    "bias_dropout_fusion": True,
    "persist_layer_norm": True,
    "apply_rope_fusion": True,
    "overlap_p2p_comm": True,
    "align_param_gather": True,
    # attention and positions
    "attention_softmax_in_fp32": False,
    "cp_comm_type": ["p2p"],
    "cuda_graph_scope": [],
    "rope_type": None,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "rotary_scaling_factor": 1.0,
    # optimizer
    "min_lr": 0.0,
    "muon_momentum": 0.9,
    "optimizer_offload_fraction": 1.0,
}
"""Fields for which the app's default differs from the library's. As in Megatron-LM, `TransformerConfig()` has the
library's default, and a command line without the flag has this one."""


@dataclass(frozen=True)
class Flag:
    """A command-line flag, and how its words become a value."""

    field: str
    """Name of the dataclass field, and of the attribute of `get_args()`."""
    spellings: tuple[str, ...]
    """All spellings. Messages use the first."""
    default: Any
    """The app's default."""
    parse: Callable[[str], Any]
    """Turns one word of the command line into a value. Raises ValueError that says what works."""
    nargs: str | int | None
    """Number of words. None: one; 0: none (a switch); a number, "+" or "*": a list of values."""
    choices: tuple[str, ...] | None
    """All words that work; None: any word that `parse` accepts."""
    switch: dict[str, bool] | None
    """For a switch: the value that each spelling sets."""
    one_or_list: bool
    """Whether a single word gives a value and several words give a list."""
    group: str
    """Section of --help."""
    declaration: FlagDeclaration
    """Everything that the field says about its flag."""
    config_class: type
    """The dataclass that states the field."""

    @property
    def turns_off(self) -> bool:
        """Whether the field's only flag is a switch that sets it to False."""
        return self.switch is not None and not self.switch[self.spelling]

    @property
    def help(self) -> str:
        """What the flag does: the docstring of the field, which is read from the source file when it is asked for, or
        its opposite if the flag turns the field off."""
        text = field_docstrings(self.config_class).get(self.field, "")
        if not self.turns_off:
            return text
        if self.declaration.off_help is not None:
            return self.declaration.off_help
        topic, rest = _TOPIC.fullmatch(text).groups()  # type: ignore[union-attr]
        return f"{topic}{'do' if topic else 'Do'} not {rest[:1].lower()}{rest[1:]}"

    @property
    def spelling(self) -> str:
        """The spelling that messages use."""
        return self.spellings[0]

    @property
    def is_free_text(self) -> bool:
        """Whether every word is a value."""
        return self.switch is None and self.choices is None and self.parse is str

    @property
    def from_checkpoint(self) -> bool:
        """Whether the value may be taken from a checkpoint, which anybody may have written."""
        declared = self.declaration.from_checkpoint
        return not self.is_free_text if declared is None else declared

    def word_of(self, value: Any) -> str:
        """Returns the word that `parse` turns into this value."""
        named = (self.declaration.words or {}).items()
        found = [word for word, means in named if means == value]
        if found:
            return found[0]
        if isinstance(value, tuple):
            return ",".join(map(value_text, value))
        if isinstance(value, list):  # over the layers, or the stages of a layout
            items = [value_text(item) for item in value]
            return "|".join(items) if value and isinstance(value[0], str) else f"[{','.join(items)}]"
        return value_text(value)


_TOPIC = re.compile("((?:[^.:]*: )?)(.*)", re.DOTALL)
"""The beginning of a help text that says what it is about, such as `With --fp8-format: `, and the rest."""


@functools.cache
def flag_table() -> dict[str, Flag]:
    """Returns all flags by field name, in the order of --help."""
    table: dict[str, Flag] = {}
    for group, classes in GROUPS.items():
        for config_class in classes:
            for flag in flags_of(config_class, group):
                assert flag.field not in table, f"two dataclasses state --{flag.field}"
                table[flag.field] = flag
    return table


@functools.cache
def flags_by_spelling() -> dict[str, Flag]:
    """Returns all flags by spelling, aliases included."""
    found: dict[str, Flag] = {}
    for flag in flag_table().values():
        for spelling in flag.spellings:
            assert spelling not in found, f"two fields are written {spelling}"
            found[spelling] = flag
    return found


def spelling_of(field: str) -> str:
    """Returns the flag that sets a field, for messages; the field's name if it has no flag."""
    flag = flag_table().get(_SET_BY.get(field, field))
    return flag.spelling if flag is not None else field


def text_of(field: str, value: Any) -> str:
    """Returns a field's value as the command line accepts it, for messages."""
    flag = flag_table().get(field)
    return flag.word_of(value) if flag is not None and flag.declaration.words else value_text(value)


_SET_BY = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_encoder_layers": "encoder_num_layers",
}
"""Fields without a flag of their own, and the field whose flag sets them."""


def flags_of(config_class: type, group: str) -> list[Flag]:
    """Returns the flags of a dataclass's own fields, without those of its bases."""
    own = inspect.get_annotations(config_class)
    annotations = typing.get_type_hints(config_class)
    return [
        _flag_of(field, annotations[field.name], config_class, group)
        for field in dataclasses.fields(config_class)
        if field.name in own and declaration_of(field).exposed
    ]


def _flag_of(field: "dataclasses.Field[Any]", annotation: object, config_class: type, group: str) -> Flag:
    declaration = declaration_of(field)
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    elif default is dataclasses.MISSING:  # required: given, derived, or reported as missing
        default = None
    default = APP_DEFAULTS.get(field.name, default)
    words = word_type(annotation)
    if declaration.parse is not None:
        words = Words(str, declaration.parse)
    elif declaration.words is not None:
        words = Words(str, choice(declaration.words), tuple(declaration.words))
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
        one_or_list=nargs == "+" and takes_one_or_list(annotation),
        group=declaration.group or group,
        declaration=declaration,
        config_class=config_class,
    )


def _switch(name: str, declaration: FlagDeclaration, default: bool) -> dict[str, bool]:
    """Returns the spellings of a bool and the value that each sets.

    A field that is True by default and declares `off` has one flag, which turns it off. Other fields have a flag that
    turns them on, and one that turns them off if `off` is declared. Aliases belong to the first flag."""
    if declaration.off is not None and default is True:
        return dict.fromkeys((declaration.off, *declaration.aliases), False)
    switch = dict.fromkeys((declaration.on or _dashed(name), *declaration.aliases), True)
    if declaration.off is not None:
        switch[declaration.off] = False
    return switch


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


SAME_THING: dict[str, tuple[str, ...]] = {
    "seq_length": ("encoder_seq_length",),
    "encoder_seq_length": ("seq_length",),
    "num_layers": ("encoder_num_layers", "decoder_num_layers"),
    "encoder_num_layers": ("num_layers",),
    "hybrid_layer_pattern": ("hybrid_attention_ratio", "hybrid_mlp_ratio", "mtp_hybrid_override_pattern"),
    "hybrid_attention_ratio": ("hybrid_layer_pattern",),
    "hybrid_mlp_ratio": ("hybrid_layer_pattern",),
    "heterogeneous_layers_config_path": ("heterogeneous_layers_config_encoded_json",),
    "lr_warmup_iters": ("lr_warmup_fraction",),
    "lr_warmup_samples": ("lr_warmup_fraction",),
    **{name: tuple(other for other in ACTIVATIONS if other != name) for name in ACTIVATIONS},
}
"""Fields that are not taken if this one is given."""
