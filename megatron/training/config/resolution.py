"""From the words of a command line to a PretrainConfig, or to the list of everything that is wrong with them."""

import dataclasses
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from torch.nn.functional import gelu, silu

from megatron.core.config_fields import declaration_of, describe_problem, fields_of_problem, value_text
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.ops.activation import gelu_tanh, quick_gelu, squared_relu
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parameters import XavierUniform
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.checks import missing_of, problems_of
from megatron.training.config.command_line import CommandLine
from megatron.training.config.data import DataConfig
from megatron.training.config.derived_values import derive_values
from megatron.training.config.evaluation import EvaluationConfig
from megatron.training.config.flag_table import Flag, flag_table, parent_of, spelling_of
from megatron.training.config.ineffective_flags import ineffective_flags
from megatron.training.config.logging import LoggingConfig
from megatron.training.config.model import ModelConfig
from megatron.training.config.parallel import ParallelConfig
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resilience import ResilienceConfig
from megatron.training.config.schedule import ScheduleConfig
from megatron.training.config.settings import LaunchEnvironment, Settings
from megatron.training.config.tokenizer import TokenizerConfig, tokenizer_problems
from megatron.training.config.training import TrainingConfig


class ConfigurationError(UserError):
    """Everything that is wrong with a command line; `problems` has a line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


def resolve(
    line: CommandLine,
    args_defaults: Mapping[str, Any] | None = None,
    launch_environment: LaunchEnvironment | None = None,
) -> PretrainConfig:
    """Complete and check what a command line says.

    `args_defaults` are a script's own defaults by published name. As published, one is used only where the value is
    None otherwise; where it is not, a note says which value stands.

    Raises ConfigurationError with all problems.
    """
    try:
        settings = Settings(line, launch_environment or LaunchEnvironment.of_this_process())
    except UserError as error:
        raise ConfigurationError([*line.problems, str(error)]) from error
    extra = dict(line.extra)
    notes = list(line.warnings) + _take_script_defaults(settings, extra, args_defaults or {})
    notes += derive_values(settings)
    problems = [*_not_yet(settings), *problems_of(settings), *tokenizer_problems(_part(TokenizerConfig, settings))]
    missing = list(missing_of(settings))
    (notes if settings.dry_run else problems).extend(missing)
    problems = [problem for problem in problems if not fields_of_problem(problem) & line.broken]
    if line.problems or problems:
        raise ConfigurationError(line.problems + [_in_flags(problem, settings) for problem in problems])
    notes = [_in_flags(note, settings) if note in missing else note for note in notes]
    try:
        return build_config(settings, [*notes, *_without_effect(settings)], extra)
    except ConfigurationError:
        raise
    except UserError as error:
        raise ConfigurationError([str(error)]) from error


def _take_script_defaults(settings: Settings, extra: dict[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    notes = []
    for name, value in defaults.items():
        field = field_of_name(name)
        if field is None:
            extra.setdefault(name, value)
        elif settings.values[field] is None:
            settings.values[field] = value
            settings.provenance[field] = "script"
        elif settings.values[field] != value:
            stands = value_text(settings.values[field])
            notes.append(f"the script's default {value_text(value)} for {name} is not used: {stands} stands")
    return notes


def field_of_name(name: str) -> str | None:
    """The field that Megatron-LM's args call `name`: by field, or by the flag that sets it."""
    table = flag_table()
    if name in table:
        return name
    for field, flag in table.items():
        turned_off = flag.switch is not None and not flag.switch[flag.spelling]
        if not turned_off and flag.spelling[2:].replace("-", "_") == name:
            return field
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Values that do not work yet, and values that change nothing


def _not_yet(settings: Settings) -> list[str]:
    """A problem for each value whose feature is still to come, and which would change the run."""
    problems = []
    for field, flag in flag_table().items():
        supported, value = flag.declaration.supported, getattr(settings, field)
        if supported is None or value in supported or value == flag.default or not _is_looked_at(flag, settings):
            continue
        works = " or ".join(value_text(item) for item in supported if item is not None and item is not False)
        problems.append(f"{{{field}}}: not yet" + (f"; what works so far is {works}" if works else ""))
    return problems


def _is_looked_at(flag: Flag, settings: Settings) -> bool:
    """Whether the flag that this one goes with is set so that this one matters."""
    parent, other_way = parent_of(flag), flag.declaration.or_with
    if parent is None or (other_way is not None and getattr(settings, other_way)):
        return True
    other, wanted = parent
    value = getattr(settings, other.field)
    return value_text(value) == wanted if wanted else value != other.default and value is not False


def _without_effect(settings: Settings) -> list[str]:
    """A line for each flag that was given and changes nothing."""
    notes = []
    for field, flag in flag_table().items():
        value = getattr(settings, field)
        if not settings.is_given(field) or value == flag.default:
            continue
        said = _in_flags(f"{{{field}}}", settings)
        if flag.declaration.no_effect is not None:
            notes.append(f"{said}: {flag.declaration.no_effect}")
        elif not _is_looked_at(flag, settings):
            notes.append(f"{said}: has no effect {_condition(flag, settings)}")
        elif (parent := parent_of(flag)) is not None and parent[0].declaration.no_effect is not None:
            notes.append(f"{said}: {parent[0].declaration.no_effect}")
    return notes + [_in_flags(sentence, settings) for sentence in ineffective_flags(settings)]


def _condition(flag: Flag, settings: Settings) -> str:
    parent = parent_of(flag)
    assert parent is not None
    other, wanted = parent
    value = getattr(settings, other.field)
    if wanted:
        return f"without {other.spelling} {wanted}"
    if other.switch is not None and not other.switch[other.spelling]:
        return f"with {other.spelling}"
    return f"without {other.spelling}" if value is None or value is False else f"while {other.spelling} is {value}"


def _in_flags(problem: str, settings: Settings) -> str:
    return describe_problem(problem, settings, spelling_of)


# ---------------------------------------------------------------------------------------------------------------------
# The config objects


def build_config(settings: Settings, notes: Iterable[str], extra: Mapping[str, Any]) -> PretrainConfig:
    """Make the config objects out of settings that were checked."""
    values = settings.values
    config_class = MLATransformerConfig if settings.multi_latent_attention else TransformerConfig
    transformer = config_class(**transformer_fields(config_class, values))
    config = PretrainConfig(
        model=_part(ModelConfig, settings, transformer=transformer),
        parallel=_part(ParallelConfig, settings),
        optimizer=_part(
            OptimizerConfig,
            settings,
            params_dtype=transformer.params_dtype,
            decoupled_weight_decay=True,
        ),
        ddp=_part(
            DistributedDataParallelConfig,
            settings,
            check_for_nan_in_grad=settings.check_for_nan_in_loss_and_grad,
        ),
        schedule=_part(ScheduleConfig, settings),
        training=_part(TrainingConfig, settings, train_iters=settings.train_iters or 0),
        data=_part(DataConfig, settings),
        tokenizer=_part(TokenizerConfig, settings),
        evaluation=_part(EvaluationConfig, settings),
        checkpoint=_part(CheckpointConfig, settings),
        logging=_part(LoggingConfig, settings),
        resilience=_part(ResilienceConfig, settings),
        provenance=dict(settings.provenance),
        notes=tuple(dict.fromkeys(notes)),
        extra=dict(extra),
    )
    final = config.flat()
    changed = {field for field, value in values.items() if field in final and final[field] != value}
    return dataclasses.replace(config, provenance={**config.provenance, **dict.fromkeys(changed, "derived")})


def _part(config_class: type, settings: Settings, **fixed: Any) -> Any:
    """A config object of the values that go by its fields' names."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return config_class(**{name: value for name, value in settings.values.items() if name in names} | fixed)


def transformer_fields(config_class: type[TransformerConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for a transformer config out of values by field name, in the app's terms (--swiglu and the like).

    `values` may lack fields; the library's defaults stand for them.
    """
    names = {field.name for field in dataclasses.fields(config_class) if declaration_of(field).exposed}
    if issubclass(config_class, MLATransformerConfig):  # it restates fields whose flags others state
        names |= {"multi_latent_attention", "normalization", "rotary_base", "rotary_percent"}
    fields = {name: value for name, value in values.items() if name in names}
    if fields.get("rope_type", "") is None:
        del fields["rope_type"]
    app = SimpleNamespace(**{name: values.get(name, default) for name, default in APP_SWITCHES.items()})
    fields |= {name: values[name] for name in ("virtual_pipeline_model_parallel_size",) if name in values}
    if not app.group_query_attention:
        fields.pop("num_query_groups", None)
    fields["gated_linear_unit"] = app.swiglu or app.quick_geglu or app.geglu
    fields["activation_func"] = _activation(app)
    fused_gelu = app.bias_gelu_fusion and fields.get("add_bias_linear", True)
    fields["bias_activation_fusion"] = app.bias_swiglu_fusion if fields["gated_linear_unit"] else fused_gelu
    fields["batch_p2p_comm"] = not fields.get("overlap_p2p_comm", False)
    fields["deallocate_pipeline_outputs"] = True
    if app.init_method_xavier_uniform:
        fields |= dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), XavierUniform())
    return fields


APP_SWITCHES: dict[str, Any] = {
    "group_query_attention": False,
    "swiglu": False,
    "squared_relu": False,
    "quick_geglu": False,
    "geglu": False,
    "openai_gelu": False,
    "bias_gelu_fusion": True,
    "bias_swiglu_fusion": True,
    "init_method_xavier_uniform": False,
}
"""Flags of the app that stand for fields of TransformerConfig, and their defaults."""


def _activation(app: SimpleNamespace) -> Any:
    if app.swiglu:
        return silu
    if app.quick_geglu:
        return quick_gelu
    if app.squared_relu:
        return squared_relu
    return gelu_tanh if app.openai_gelu or app.geglu else gelu
