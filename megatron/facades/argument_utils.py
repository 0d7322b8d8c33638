"""The settings of a run as scripts of Megatron-LM's releases 0.17 to 0.19 hand them to `pretrain`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from megatron.conversion.hub_run import take_hub_args
from megatron.core.exceptions import UserError
from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.transformer_block import block_spec_of_flag
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.facades import global_vars
from megatron.facades.arguments import Arguments, parse_args, validate_args
from megatron.facades.arguments import core_transformer_config_from_args as core_transformer_config_from_args
from megatron.training.config.command_line import ExtraArgsProvider
from megatron.training.config.pretrain_config import PretrainConfig

Positions = Literal["learned_absolute", "rope", "mrope", "yarn", "none"]


def parse_and_validate_args(
    extra_args_provider: ExtraArgsProvider | None = None,
    ignore_unknown_args: bool = False,
    args_defaults: Mapping[str, object] | None = None,
) -> Arguments:
    """Returns the arguments of the command line, checked and with derived values, as `validate_args(parse_args(...))`
    does. `--load-hf` is read too. After mistakes, prints all of them and exits with code 2."""
    args = parse_args(extra_args_provider, ignore_unknown_args, take_flags=take_hub_args)
    return validate_args(args, args_defaults)


@dataclass(kw_only=True)
class ModelSettings:
    """What both kinds of model have. `vocab_size` None: the run's, with the padding that its flags ask for."""

    transformer: TransformerConfig
    vocab_size: int | None = None
    seq_length: int = 1024
    make_vocab_size_divisible_by: int = 128
    fp16_lm_cross_entropy: bool = False
    parallel_output: bool = True
    share_embeddings_and_output_weights: bool = False
    rotary_percent: float = 1.0
    rotary_base: float = 10000
    seq_len_interpolation_factor: float | None = None
    restore_modelopt_state: bool = False
    pre_wrap_hooks: list[Callable[..., object]] = field(default_factory=list)
    post_wrap_hooks: list[Callable[..., object]] = field(default_factory=list)

    def of_model(self) -> dict[str, Any]:
        """Returns the arguments that both models take. Raises UserError for settings without a meaning here."""
        for name in ("restore_modelopt_state", "pre_wrap_hooks", "post_wrap_hooks"):
            if getattr(self, name):
                raise UserError(f"{type(self).__name__}({name}=...): not yet; change the model in a model provider")
        return {
            "config": self.transformer,
            "vocab_size": global_vars.get_args().padded_vocab_size if self.vocab_size is None else self.vocab_size,
            "max_sequence_length": self.seq_length,
            "fp16_lm_cross_entropy": self.fp16_lm_cross_entropy,
            "parallel_output": self.parallel_output,
            "share_embeddings_and_output_weights": self.share_embeddings_and_output_weights,
            "rotary_percent": self.rotary_percent,
            "rotary_base": self.rotary_base,
            "seq_len_interpolation_factor": self.seq_len_interpolation_factor,
        }


@dataclass(kw_only=True)
class GPTModelConfig(ModelSettings):
    """Settings of a GPTModel. `transformer_layer_spec`: a spec, or a function (transformer config, vp_stage) -> spec;
    None: the layers that the transformer config describes."""

    transformer_layer_spec: Any = None
    position_embedding_type: Positions = "learned_absolute"
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0

    def build_model(
        self,
        pg_collection: ProcessGroupCollection | None,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> GPTModel:
        """Returns the part of the model on a (virtual) pipeline stage."""
        layers = self.transformer_layer_spec
        if layers is None:
            layers = get_gpt_decoder_block_spec(self.transformer, use_transformer_engine=False, vp_stage=vp_stage)
        elif callable(layers):
            layers = layers(self.transformer, vp_stage)
        predicting = get_gpt_mtp_block_spec(self.transformer, layers, use_transformer_engine=False, vp_stage=vp_stage)
        return GPTModel(
            transformer_layer_spec=layers,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type=self.position_embedding_type,
            rope_scaling=self.rope_scaling,
            rope_scaling_factor=self.rope_scaling_factor,
            mtp_block_spec=predicting,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **self.of_model(),
        )


@dataclass(kw_only=True)
class HybridModelConfig(ModelSettings):
    """Settings of a HybridModel."""

    hybrid_layer_pattern: str | None = None
    hybrid_stack_spec: Any = None
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "none"

    def build_model(
        self,
        pg_collection: ProcessGroupCollection | None,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> HybridModel:
        """Returns the part of the model on a (virtual) pipeline stage."""
        return HybridModel(
            hybrid_stack_spec=self.hybrid_stack_spec or hybrid_stack_spec,
            hybrid_layer_pattern=self.hybrid_layer_pattern,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type=self.position_embedding_type,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **self.of_model(),
        )


def _settings(args: Any, config: TransformerConfig | None, config_class: type) -> dict[str, Any]:
    """Returns the values that arguments have for the fields of a class of model settings."""
    names = {one.name for one in dataclasses.fields(config_class)} - {"vocab_size"}
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return values | {
        "transformer": core_transformer_config_from_args(args) if config is None else config,
        "seq_length": args.max_position_embeddings,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor,
    }


def _layers_of(args: Any) -> Callable[..., object] | None:
    """Returns the function that makes the layers of --spec; None without."""
    return None if args.spec in (None, ["local"]) else functools.partial(block_spec_of_flag, args.spec)


def gpt_config_from_args(
    args: Any, config: TransformerConfig | None = None, model_config_cls: type[Any] = GPTModelConfig
) -> Any:
    """Returns the settings of the GPT that arguments describe. `config` replaces their transformer config."""
    values = _settings(args, config, model_config_cls) | {"rope_scaling": args.use_rope_scaling}
    return model_config_cls(**values | {"transformer_layer_spec": _layers_of(args)})


def hybrid_config_from_args(
    args: object, config: TransformerConfig | None = None, model_config_cls: type[object] = HybridModelConfig
) -> Any:
    """Returns the settings of the hybrid model that arguments describe. `config` replaces their transformer config."""
    values = _settings(args, config, model_config_cls)
    return model_config_cls(**values | {"hybrid_stack_spec": _layers_of(args)})


_SECTIONS = {
    "train": "training",
    "validation": "evaluation",
    "optimizer": "optimizer",
    "scheduler": "schedule",
    "ddp": "ddp",
    "logger": "logging",
    "checkpoint": "checkpoint",
    "tokenizer": "tokenizer",
    "rerun_state_machine": "resilience",
}
"""Megatron-LM's names of parts of a run's settings, and ours."""


@dataclass(frozen=True)
class PretrainConfigContainer:
    """The settings of a run. `train`, `validation`, `optimizer`, `scheduler`, `ddp`, `logger`, `checkpoint`,
    `tokenizer` and `rerun_state_machine` are the parts of `config` under Megatron-LM's names."""

    config: PretrainConfig
    model: Any = None
    """Settings of the model, with `build_model`; None if a model provider builds it."""

    def __getattr__(self, name: str) -> Any:
        if name in _SECTIONS:
            return getattr(self.config, _SECTIONS[name])
        raise AttributeError(f"the settings of a run have no {name!r}; they have {', '.join(_SECTIONS)} and model")

    def model_provider(self) -> Callable[..., nn.Module]:
        """Returns a model provider that builds `model`. Raises UserError without it."""
        settings = self.model
        if settings is None:
            raise UserError(
                "pretrain: nothing says how to build the model; give pretrain_cfg_container_from_args a model_cfg, "
                "such as gpt_config_from_args(args), or pretrain a model_provider"
            )

        def provide(
            pre_process: bool = True,
            post_process: bool = True,
            vp_stage: int | None = None,
            pg_collection: object = None,
        ) -> nn.Module:
            model: nn.Module = settings.build_model(pg_collection, pre_process, post_process, vp_stage)
            return model

        return provide


def pretrain_cfg_container_from_args(args: object, model_cfg: object = None) -> PretrainConfigContainer:
    """Returns the settings of a run for `pretrain`, from arguments that `validate_args` has checked. Raises UserError
    for others."""
    config = getattr(args, "config", None)
    if not isinstance(config, PretrainConfig):
        raise UserError(
            "pretrain_cfg_container_from_args: the arguments are not checked; parse_and_validate_args() does"
        )
    return PretrainConfigContainer(config, model_cfg)
