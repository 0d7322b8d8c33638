"""Turns a parsed command line into a PretrainConfig, or into a list of everything that is wrong with it."""

import dataclasses
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from torch.nn.functional import gelu

from megatron.core.declarations.config_fields import (
    declaration_of,
    describe_problem,
    fields_of_problem,
    literal_text,
    value_text,
)
from megatron.core.exceptions import UserError
from megatron.core.initializers import XavierUniform
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils.url_keys import hide_keys
from megatron.training.config.checks import missing_values, problems_of
from megatron.training.config.command_line import CommandLine
from megatron.training.config.derived_values import derive_values
from megatron.training.config.flag_table import flag_table, spelling_of, text_of
from megatron.training.config.ineffective_flags import is_read, notes_on_ineffective_flags
from megatron.training.config.messages import message_of
from megatron.training.config.model import ACTIVATIONS
from megatron.training.config.pretrain_config import PretrainConfig, config_classes
from megatron.training.config.settings import LaunchEnvironment, Settings
from megatron.training.config.unsupported_flags import refusal_of


class ConfigurationError(UserError):
    """All mistakes of a command line. `problems` has one line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(dict.fromkeys(map(hide_keys, problems)))
        super().__init__("\n".join(self.problems))


def resolve(
    line: CommandLine,
    args_defaults: Mapping[str, Any] | None = None,
    launch_environment: LaunchEnvironment | None = None,
) -> PretrainConfig:
    """Completes and checks the values of a command line.

    `args_defaults` are the defaults of a user's script, by Megatron-LM's name, and the `model_family` of an entry
    script. As in Megatron-LM, such a default is used only where the value would be None. Otherwise a note
    names the value that is used.

    Raises ConfigurationError with all problems.
    """
    try:
        settings = Settings(line, launch_environment or LaunchEnvironment.of_this_process())
    except UserError as error:
        raise ConfigurationError([*line.problems, message_of(error)]) from error
    extra = dict(line.extra)
    notes = list(line.warnings) + _take_script_defaults(settings, extra, args_defaults or {})
    notes += derive_values(settings)
    problems = [*_unsupported_values(settings), *problems_of(settings)]
    missing = list(missing_values(settings))
    (notes if settings.dry_run else problems).extend(missing)
    problems = [problem for problem in problems if not fields_of_problem(problem) & line.broken]
    if line.problems or problems:
        raise ConfigurationError(
            line.problems + [_in_flags(problem, settings) + _origins(problem, line) for problem in problems]
        )
    notes = [_in_flags(note, settings) if note in missing else note for note in notes]
    try:
        ineffective = [_in_flags(note, settings) for note in notes_on_ineffective_flags(settings)]
        return build_config(settings, [*notes, *ineffective], extra)
    except ConfigurationError:
        raise
    except UserError as error:
        raise ConfigurationError([message_of(error)]) from error


def _take_script_defaults(settings: Settings, extra: dict[str, object], defaults: Mapping[str, Any]) -> list[str]:
    notes = []
    for name, value in defaults.items():
        field = name if name in ("model_family", "datasets_of_script", "loop_of_script") else field_of_name(name)
        if field is None:
            extra.setdefault(name, value)
        elif settings.values[field] is None:
            settings.values[field] = value
            settings.provenance[field] = "script"
        elif settings.values[field] != value:
            used = value_text(settings.values[field])
            notes.append(f"the script's default {value_text(value)} for {name} is not used: the value is {used}")
    return notes


def field_of_name(name: str) -> str | None:
    """Returns the field that Megatron-LM's args call `name`: by its own name or that of its flag. None: no field."""
    table = flag_table()
    if name in table:
        return name
    for field, flag in table.items():
        turned_off = flag.switch is not None and not flag.switch[flag.spelling]
        if not turned_off and flag.spelling[2:].replace("-", "_") == name:
            return field
    return None


def _unsupported_values(settings: Settings) -> list[str]:
    """Returns a problem for each value that is not supported and would change the run."""
    problems = []
    for field, flag in flag_table().items():
        supported, value = flag.declaration.supported, getattr(settings, field)
        if supported is None or value in supported or value == flag.default or not is_read(flag, settings):
            continue
        refusal = refusal_of(flag.spelling)
        if refusal is not None:
            problems.append(f"{{{field}}}: {literal_text(refusal)}")
            continue
        works = " or ".join(value_text(item) for item in supported if item is not None and item is not False)
        problems.append(f"{{{field}}}: not yet; what works so far is {works}")
    return problems


def _origins(problem: str, line: CommandLine) -> str:
    """Returns where another program's file says the values of a problem, as no flag of the user does."""
    said = [line.from_foreign[name] for name in sorted(fields_of_problem(problem)) if name in line.from_foreign]
    return f" (from {'; '.join(dict.fromkeys(said))})" if said else ""


def _in_flags(problem: str, settings: Settings) -> str:
    """Returns the problem with flags and values in place of fields."""
    return describe_problem(problem, settings, spelling_of, text_of)


# ---------------------------------------------------------------------------------------------------------------------
# The config objects


def build_config(settings: Settings, notes: Iterable[str], extra: Mapping[str, Any]) -> PretrainConfig:
    """Builds the config objects from checked settings."""
    values = settings.values
    config_class = MLATransformerConfig if settings.multi_latent_attention else TransformerConfig
    transformer = config_class(**transformer_fields(config_class, values))
    fixed: dict[str, dict[str, object]] = {
        "model": {"transformer": transformer},
        "optimizer": {
            "params_dtype": transformer.params_dtype,
            "decoupled_weight_decay": True,
            # Without muP a value that was given has no effect, as its note says.
            "mup_width_mult": transformer.mup_width_mult if transformer.use_mup else 1.0,
        },
        "ddp": {"check_for_nan_in_grad": settings.check_for_nan_in_loss_and_grad},
        "training": {"train_iters": settings.train_iters or 0},
    }
    config = PretrainConfig(
        **{name: settings.build(part, **fixed.get(name, {})) for name, part in config_classes().items()},
        provenance=dict(settings.provenance),
        notes=tuple(dict.fromkeys(notes)),
        extra=dict(extra),
    )
    final = config.flat()
    changed = {field for field, value in values.items() if field in final and final[field] != value}
    return dataclasses.replace(config, provenance={**config.provenance, **dict.fromkeys(changed, "derived")})


def transformer_fields(config_class: type[TransformerConfig], values: Mapping[str, object]) -> dict[str, Any]:
    """Returns the keyword arguments of a transformer config, from the app's values by field name. Translates the app's
    switches, such as `swiglu`, into the library's fields.

    `values` may lack fields; these keep the library's defaults.
    """
    names = {field.name for field in dataclasses.fields(config_class) if declaration_of(field).exposed}
    if issubclass(
        config_class, MLATransformerConfig
    ):  # it declares fields again whose flags belong to other dataclasses
        names |= {"multi_latent_attention", "normalization", "rotary_base", "rotary_percent"}
    fields = {name: value for name, value in values.items() if name in names}
    if fields.get("rope_type", "") is None:
        del fields["rope_type"]
    app = SimpleNamespace(**{name: values.get(name, default) for name, default in APP_SWITCHES.items()})
    fields |= {name: values[name] for name in _SET_BY_OTHERS if name in values}
    if not app.group_query_attention:
        fields.pop("num_query_groups", None)
    chosen = [activation for name, activation in ACTIVATIONS.items() if getattr(app, name)]
    fields["gated_linear_unit"] = any(activation.gated for activation in chosen)
    fields["activation_func"] = chosen[0].function if chosen else gelu
    fused_gelu = app.bias_gelu_fusion and fields.get("add_bias_linear", True)
    fields["bias_activation_fusion"] = app.bias_swiglu_fusion if fields["gated_linear_unit"] else fused_gelu
    fields["batch_p2p_comm"] = not fields.get("overlap_p2p_comm", False)
    fields["deallocate_pipeline_outputs"] = True
    if app.init_method_xavier_uniform:
        fields |= dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), XavierUniform())
    return fields


_SET_BY_OTHERS = ("virtual_pipeline_model_parallel_size", "num_encoder_layers")
"""Fields without a flag of their own, whose values follow from other flags."""

APP_SWITCHES: dict[str, Any] = {
    "group_query_attention": False,
    **dict.fromkeys(ACTIVATIONS, False),
    "bias_gelu_fusion": True,
    "bias_swiglu_fusion": True,
    "init_method_xavier_uniform": False,
}
"""Switches of the app that set fields of TransformerConfig, and their defaults."""
