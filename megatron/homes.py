"""Where Megatron-LM's public names are defined, for scripts that import them from another module.

A name is defined once. Three tables lead to the definitions:

- `lazy_names` gives a package names of its modules, which are imported when the name is first used;
- `MOVED` lists modules that have another path now; both paths give the same module;
- `OLD_HOMES` lists modules that do not exist here and that scripts of Megatron-LM's releases import. This table is the
  only place for them: a module of the table is made when a script imports it. Our own code does not import them.

A name that has no meaning here (`NotHere`) can be imported and used in annotations. Calling it raises UserError with
what to do instead.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from types import ModuleType
from typing import Any, NoReturn


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package: imports a name from its module in `homes` at the first use. The value
    "module:name" renames it; "module:" is the module itself."""

    def get(name: str) -> Any:
        if name in homes:
            return _resolve(homes[name], name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


def _resolve(home: str, name: str) -> Any:
    module, renamed, original = home.partition(":")
    found = importlib.import_module(module)
    return found if renamed and not original else getattr(found, original or name)


# ---------------------------------------------------------------------------------------------------------------------
# Names without a meaning here


@dataclass(frozen=True)
class NotHere:
    """A name of Megatron-LM that cannot be served. `advice`: what to do instead, as a sentence."""

    advice: str

    def stand_in(self, name: str) -> type:
        """Returns a class of this name. Its construction, and reading an attribute of it, raise UserError."""
        return _Refusing(name.rpartition(".")[2], (), {"__doc__": f"Not here: {self.advice}", "advice": self.advice})


class _Refusing(type):
    advice: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise _refusal(f"{cls.__name__}(...): {cls.advice}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refusal(f"{cls.__name__}.{name}: {cls.advice}")


def _refusal(message: str) -> Exception:
    return importlib.import_module("megatron.core.exceptions").UserError(message)


# ---------------------------------------------------------------------------------------------------------------------
# Old homes

_LEGACY_MODEL = NotHere(
    "the models before megatron.core are not here; give --use-mcore-models (scripts of releases 0.5 to 0.7), or leave "
    "out --use-legacy-models"
)
_LEGACY_DATASETS = NotHere(
    "give Accelerate's plugin custom_megatron_datasets_provider_function and custom_get_batch_function, or a DataLoader"
)
_LEGACY_MODELS = {"BertModel": _LEGACY_MODEL, "GPTModel": _LEGACY_MODEL, "T5Model": _LEGACY_MODEL}
_TE = NotHere("modules of Transformer Engine are not here; name the class of megatron.core in the layer spec")
_TE_NAMES: dict[str, str | NotHere] = {
    "TEColumnParallelLinear": "megatron.core.tensor_parallel.layers:ColumnParallelLinear",
    "TEDotProductAttention": "megatron.core.transformer.dot_product_attention:DotProductAttention",
    "TELayerNormColumnParallelLinear": "megatron.core.transformer.normed_linear:NormedColumnParallelLinear",
    "TENorm": "megatron.core.transformer.torch_norm:WrappedTorchNorm",
    "TERowParallelLinear": "megatron.core.tensor_parallel.layers:RowParallelLinear",
    "TEColumnParallelGroupedLinear": _TE,
    "TEDelayedScaling": _TE,
    "TELinear": _TE,
    "TERowParallelGroupedLinear": _TE,
}
_MODELOPT = NotHere(
    "ModelOpt is not used here: tools/checkpoint/convert.py exports the checkpoint to a Hugging Face folder, which "
    "ModelOpt quantises, prunes or distils"
)
_YAML = NotHere("not yet: --yaml-cfg; give the settings as flags, config from core_transformer_config_from_args(args)")

OLD_HOMES: dict[str, str | dict[str, str | NotHere]] = {
    # Release 0.5, where the app was directly in `megatron`
    "megatron": {
        "get_args": "megatron.training",
        "get_timers": "megatron.training",
        "get_tokenizer": "megatron.training",
        "get_tensorboard_writer": "megatron.training",
        "get_num_microbatches": "megatron.facades.num_microbatches_calculator",
        "get_current_global_batch_size": "megatron.facades.num_microbatches_calculator",
        "update_num_microbatches": "megatron.facades.num_microbatches_calculator",
        "initialize_megatron": "megatron.facades.initialize",
        "is_last_rank": "megatron.facades.utils",
        "print_rank_0": "megatron.facades.utils",
        "print_rank_last": "megatron.facades.utils",
    },
    "megatron.arguments": "megatron.training.arguments",
    "megatron.checkpointing": "megatron.facades.checkpointing",
    "megatron.global_vars": "megatron.facades.global_vars",
    "megatron.initialize": "megatron.facades.initialize",
    "megatron.model": {**_LEGACY_MODELS},
    "megatron.utils": "megatron.facades.utils",
    # Releases 0.6 to 0.16
    "megatron.legacy.model": {**_LEGACY_MODELS},
    "megatron.core.models.gpt.experimental_attention_variant_module_specs": {
        "get_transformer_block_with_experimental_attention_variant_spec": "megatron.core.models.gpt.gpt_layer_specs",
    },
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs": {
        "get_gpt_heterogeneous_layer_spec": "megatron.core.models.gpt.gpt_layer_specs",
    },
    # Releases 0.17 to 0.19
    "megatron.core.tokenizers.utils.build_tokenizer": {
        "build_tokenizer": "megatron.data.tokenizer.build:build_tokenizer_of_args",
    },
    "megatron.training.config.container": {"PretrainConfigContainer": "megatron.facades.argument_utils"},
    "megatron.training.models.gpt": {"GPTModelConfig": "megatron.facades.argument_utils"},
    "megatron.training.models.hybrid": {"HybridModelConfig": "megatron.facades.argument_utils"},
    "megatron.post_training.arguments": {
        "add_modelopt_args": "megatron.facades.modelopt",
        "modelopt_args_enabled": "megatron.facades.modelopt",
    },
    "megatron.post_training.loss_func": {"loss_func": _MODELOPT},
    "megatron.post_training.model_provider": {"model_provider": _MODELOPT},
    "megatron.post_training.model_builder": {
        "modelopt_gpt_hybrid_builder": _MODELOPT,
        "modelopt_gpt_mamba_builder": _MODELOPT,
    },
    "megatron.core.tokenizers": {
        "MegatronTokenizer": NotHere("the run's tokenizer is megatron.training.get_tokenizer()"),
    },
    "megatron.core.tokenizers.text.utils.build_tokenizer": {
        "build_tokenizer": "megatron.data.tokenizer.build:build_tokenizer_of_args",
    },
    "megatron.training.datasets.fim_dataset": "megatron.data.datasets.fim_dataset",
    "megatron.training.datasets.sft_dataset": "megatron.data.datasets.sft_dataset",
    "megatron.training.inprocess_restart": {
        "maybe_wrap_for_inprocess_restart": "megatron.training.launch.start_times",
    },
    "megatron.training.tokenizer.tokenizer": {
        "_vocab_size_with_padding": "megatron.facades.accelerate_plugin",
        "_NullTokenizer": "megatron.data.tokenizer.null:NullTokenizer",
        "MegatronTokenizer": "megatron.data.tokenizer.base:Tokenizer",
        "build_tokenizer": "megatron.data.tokenizer.build:build_tokenizer_of_args",
    },
    "megatron.training.gpt_builders": "gpt_builders",
    "megatron.legacy.data.dataset_utils": {"build_train_valid_test_datasets": _LEGACY_DATASETS},
    "megatron.legacy.model.classification": {"Classification": _LEGACY_MODEL},
    "megatron.training.yaml_arguments": {"core_transformer_config_from_yaml": _YAML},
    "megatron.core.extensions.transformer_engine": _TE_NAMES,
    "megatron.core.transformer.custom_layers.transformer_engine": _TE_NAMES,
    "megatron.training.datasets.data_samplers": {
        "MegatronPretrainingRandomSampler": "megatron.training.data.samplers",
        "MegatronPretrainingSampler": "megatron.training.data.samplers",
        "build_pretraining_data_loader": "megatron.facades.training",
    },
    "megatron.legacy.data.data_samplers": {
        "MegatronPretrainingRandomSampler": "megatron.training.data.samplers",
        "MegatronPretrainingSampler": "megatron.training.data.samplers",
        "build_pretraining_data_loader": "megatron.facades.training",
    },
    "megatron.core.models.mamba.mamba_layer_specs": {
        "mamba_stack_spec": "megatron.core.models.hybrid.hybrid_layer_specs:hybrid_stack_spec",
    },
    # Modules whose names are defined in others here
    "megatron.core.activations": {
        "quick_gelu": "megatron.core.ops.activation",
        "squared_relu": "megatron.core.ops.activation",
    },
    "megatron.core.datasets.megatron_tokenizer": {
        "MegatronLegacyTokenizer": "megatron.data.tokenizer.base:MegatronTokenizer",
        "MegatronTokenizer": "megatron.data.tokenizer.base",
    },
    "megatron.core.fusions.fused_layer_norm": {
        "FusedLayerNorm": "megatron.core.transformer.torch_norm:WrappedTorchNorm",
    },
    "megatron.core.inference_params": {
        "InferenceParams": "megatron.core.inference.static_context",
    },
    "megatron.core.package_info": {"__version__": "megatron.core.utils.versions:MEGATRON_LM_RELEASE"},
    "megatron.core.tensor_parallel.data": {"broadcast_data": "megatron.core.tensor_parallel.utils"},
    "megatron.core.transformer.torch_layer_norm": {
        "WrappedTorchLayerNorm": "megatron.core.transformer.torch_norm:WrappedTorchNorm",
    },
    "megatron.core.transformer.utils": {
        "make_sharded_tensors_for_checkpoint": "megatron.core.tensor_parallel.sharded_state",
        "sharded_state_dict_default": "megatron.core.tensor_parallel.sharded_state",
    },
    "megatron.core.datasets.blended_megatron_dataset_config.BlendedMegatronDatasetConfig": {},
    "megatron.core.dist_checkpointing.core": {
        "CheckpointingException": "megatron.core.dist_checkpointing.mapping",
    },
    "megatron.core.inference.contexts": {
        "StaticInferenceContext": "megatron.core.inference.static_context",
    },
    "megatron.core.inference.sampling_params": {"SamplingParams": "megatron.core.inference.sampling"},
    "megatron.core.jit": {"jit_fuser": "megatron.core.utils.versions:jit_fuser"},
}
"""Old module: the module that replaces it, or its names, each with "module", "module:name" or `NotHere`."""


def look_up(module: str, name: str) -> Any:
    """Returns the object that `module.name` stands for, as `OLD_HOMES` says. Raises AttributeError if it is not in the
    table."""
    home = OLD_HOMES.get(module, {})
    if isinstance(home, str):
        return getattr(importlib.import_module(home), name)
    if name in home:
        found = home[name]
        made = found.stand_in(name) if isinstance(found, NotHere) else _resolve(found, name)
        setattr(sys.modules[module], name, made)
        return made
    if f"{module}.{name}" in _MODULES:
        return importlib.import_module(f"{module}.{name}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


_MODULES = {".".join(words[:n]) for words in (name.split(".") for name in OLD_HOMES) for n in range(2, len(words) + 1)}
"""The old modules, and the packages that they are in."""


MOVED = {
    # Megatron-LM's modules
    "megatron.core.config": "megatron.facades.config",
    "megatron.core.datasets": "megatron.data.datasets",
    "megatron.core.enums": "megatron.core.declarations.enums",
    "megatron.core.model_parallel_config": "megatron.core.declarations.model_parallel_config",
    "megatron.core.num_microbatches_calculator": "megatron.facades.num_microbatches_calculator",
    "megatron.core.optimizer_param_scheduler": "megatron.core.schedule.optimizer_param_scheduler",
    "megatron.core.parallel_state": "megatron.facades.parallel_state",
    "megatron.core.process_groups_config": "megatron.core.groups.process_groups_config",
    "megatron.core.rerun_state_machine": "megatron.core.health.rerun_state_machine",
    "megatron.training.checkpointing": "megatron.facades.checkpointing",
    "megatron.training.dist_signal_handler": "megatron.facades.dist_signal_handler",
    "megatron.training.argument_utils": "megatron.facades.argument_utils",
    "megatron.training.global_vars": "megatron.facades.global_vars",
    "megatron.training.initialize": "megatron.facades.initialize",
    "megatron.training.training": "megatron.facades.training",
    "megatron.training.utils": "megatron.facades.utils",
    # Ours, which programs import from where they were
    "megatron.core.collectives": "megatron.core.communication.collectives",
    "megatron.core.config_fields": "megatron.core.declarations.config_fields",
    "megatron.core.flag_grammars": "megatron.core.declarations.flag_grammars",
    "megatron.core.rank_grid": "megatron.core.groups.rank_grid",
    "megatron.core.straggler_detector": "megatron.core.health.straggler_detector",
    "megatron.training.config.tokenizer": "megatron.data.tokenizer.config",
    "megatron.training.conversion": "megatron.conversion",
    "megatron.training.data.bert_data": "megatron.training.data.masked_data",
    "megatron.training.data.gpt_data": "megatron.training.data.sources",
    "megatron.training.data.source_losses": "megatron.training.data.sources",
    "megatron.training.data.t5_data": "megatron.training.data.masked_data",
    "megatron.training.data_preparation": "megatron.data.preparation",
    "megatron.training.dry_run": "megatron.diagnosis.dry_run",
    "megatron.training.checkpoint_contents": "megatron.training.state",
    "megatron.training.config.logging": "megatron.training.config.log",
    "megatron.training.layout_check": "megatron.diagnosis.layout_check",
    "megatron.training.logging": "megatron.training.log",
    "megatron.training.pretraining": "megatron.training.loop",
    "megatron.training.replay": "megatron.diagnosis.replay",
    "megatron.training.tokenizer": "megatron.data.tokenizer",
}
"""Modules and packages under their old paths, and where they are. An import of an old path gives the same module."""


def moved_to(name: str) -> str | None:
    """Returns the present path of a module that is imported by an old one; None if the path is not old."""
    words = name.split(".")
    for count in range(len(words), 2, -1):
        home = MOVED.get(".".join(words[:count]))
        if home is not None:
            return ".".join([home, *words[count:]])
    return None


class MovedModules(MetaPathFinder, Loader):
    """Serves the old paths of `MOVED`. Searched first: the import system would otherwise find the file of a module in
    a moved package a second time."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Returns the spec of a module by its old path; None for any other."""
        home = moved_to(fullname) if fullname.startswith("megatron.") else None
        if home is None or importlib.util.find_spec(home) is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module at the present path in place of the new one."""
        home = moved_to(module.__name__)
        assert home is not None
        sys.modules[module.__name__] = importlib.import_module(home)


class OldHomes(MetaPathFinder, Loader):
    """Makes the modules of `OLD_HOMES` when they are imported. Searched last, so that a real module of the same name
    wins."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Returns the spec of an old module; None for any other."""
        if fullname not in _MODULES:
            return None
        return ModuleSpec(fullname, self, is_package=any(name.startswith(f"{fullname}.") for name in _MODULES))

    def exec_module(self, module: ModuleType) -> None:
        """Gives a new module its names, which are looked up when they are used."""
        home = OLD_HOMES.get(module.__name__, {})
        module.__doc__ = "A home of Megatron-LM's names for old scripts; see megatron.homes."
        module.__getattr__ = lambda name: look_up(module.__name__, name)  # type: ignore[method-assign]
        if not isinstance(home, str):
            module.__dict__["__all__"] = list(home)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Yields a distribution `megatron-core`, for programs that ask for its version before they use these names.
        Only a search by this name finds it."""
        if context.name is not None and context.name.replace("_", "-").lower() == "megatron-core":
            yield _NamesOfMegatronCore()


class _NamesOfMegatronCore(Distribution):
    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        release = importlib.import_module("megatron.core.utils.versions").MEGATRON_LM_RELEASE
        return (
            f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {release}\nSummary: names of megatron-pretraining\n"
        )

    def locate_file(self, path: str | PathLike[str]) -> NoReturn:
        raise FileNotFoundError(f"megatron-core is not installed; megatron-pretraining has its names: {path}")


def install_old_homes() -> None:
    """Makes the old modules importable. Called once, when `megatron` is imported."""
    if not any(isinstance(finder, OldHomes) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
        sys.meta_path.append(OldHomes())
