"""A family: an architecture of transformers that can be converted."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.conversion.config_json import with_defaults
from megatron.conversion.config_rules import Rule, Values
from megatron.conversion.hub_defaults import HUB_DEFAULTS, SIZES, Json
from megatron.conversion.tensor_mapping import TensorMapping
from megatron.core.exceptions import UserError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIE = "tie_word_embeddings"
PREDICTION_LAYERS = "num_mtp_layers"
"""Key with the number of layers of multi-token prediction."""

_ABOUT_FILES = ("_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype", "vocab_size")
_ABOUT_USE = ("bos_token_id", "eos_token_id", "pad_token_id", "output_attentions", "output_hidden_states", "use_cache")
_ABOUT_PROGRAMS = ("pretraining_tp", "return_dict", "torchscript", "transformers_version")
_ABOUT_TRAINING = ("output_router_logits", "router_aux_loss_coef")
_NOT_OF_THE_FUNCTION = frozenset((*_ABOUT_FILES, *_ABOUT_USE, *_ABOUT_PROGRAMS, *_ABOUT_TRAINING))
"""Keys that do not change what the model computes. How it is trained is a matter of the run's own flags."""


@dataclass(frozen=True)
class Family:
    """An architecture of transformers: its tensors, and the rules for its config.json."""

    architecture: str
    """Name of its class, as in the `architectures` of config.json."""
    model_type: str
    tensors: TensorMapping | Callable[[Values], TensorMapping]
    """Hub tensors by canonical name, or the function that returns them for the values of a run. A family needs a
    function if names, or the slices of our tensors that a hub tensor holds, depend on the config."""
    rules: tuple[Rule, ...]
    defaults: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    """Values that transformers gives to absent keys, of a `model_type` that hub_defaults.toml does not have."""
    constants: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    """Patterns of tensors in files that are not weights of this class: constants, which old releases of transformers
    stored, and heads of other classes."""
    model_family: str = "gpt"
    """Our model family, which determines the entry script."""
    copies: Mapping[str, str] = dataclasses.field(default_factory=lambda: {HEAD: EMBEDDING})
    """Hub tensors that may be in a file although they are tied to another one, and the names of those."""
    unties: bool = False
    """Whether the class of transformers ignores `tie_word_embeddings` and reads the weights of `copies` from files."""
    other_model_types: tuple[str, ...] = ()
    """Values of `model_type` of the same form, in files whose code is beside them; the class must be this one."""
    old_names: tuple[tuple[str, str], ...] = ()
    """Patterns of parts of names that old releases of transformers wrote, and the parts that replace them."""

    @property
    def all_defaults(self) -> dict[str, Json]:
        """The values that transformers gives to absent keys."""
        return {**HUB_DEFAULTS.get(self.model_type, {}), **self.defaults}

    def tensors_of(self, values: Values) -> TensorMapping:
        """Returns the hub tensors by canonical name, for the values of a run."""
        return self.tensors(values) if callable(self.tensors) else self.tensors

    def complete_config(self, config: Json, file: str = "config.json") -> dict[str, Json]:
        """Returns the keys of config.json with the defaults of transformers for those that are absent.

        Raises UserError, naming `file` and key, for values of a wrong type and for a `model_type` of another family.
        """
        model_type = config.get("model_type")
        problems = []
        if model_type not in (None, self.model_type, *self.other_model_types):
            problems.append(
                f"architectures is {self.architecture}, which has model_type {self.model_type!r}, but model_type is "
                f"{model_type!r}; correct the wrong one"
            )
        try:
            config = with_defaults(config, self.model_type, self.defaults)
        except UserError as error:
            problems += str(error).splitlines()
        _raise_all(problems, file)
        return dict(config)

    def lacks_prediction_layers(self, config: Json, tensors: Iterable[str]) -> bool:
        """Whether config.json, completed, has layers of multi-token prediction that the files do not hold. transformers
        drops these layers when it saves a model, but not the key with their number."""
        first = f"model.layers.{config.get('num_hidden_layers')}."
        return bool(config.get(PREDICTION_LAYERS)) and not any(name.startswith(first) for name in tensors)

    def fields_of(self, config: Json, ignored: Sequence[str] = (), file: str = "config.json") -> dict[str, Any]:
        """Returns our fields for what config.json says.

        Raises UserError with all problems, each naming `file` and key: values that are unsupported, sizes that are
        missing, and keys that are unknown here and not `ignored`.
        """
        config = self.complete_config(config, file)
        known = {key for rule in self.rules for key in rule.reads} | _NOT_OF_THE_FUNCTION | set(ignored)
        unknown = sorted(key for key, value in config.items() if key not in known and value is not None)
        problems = [f"{key} is not known for {self.architecture}" for key in unknown]
        fields: dict[str, Any] = {}
        missing: set[str] = set()
        for rule in self.rules:
            try:
                fields |= rule.fields(config)
            except UserError as error:
                problems.append(str(error))
            except KeyError as error:  # all other keys have a default
                if error.args[0] not in SIZES:
                    raise
                missing.add(error.args[0])
        problems += [f"{key} is missing; it must be an integer" for key in sorted(missing)]
        _raise_all(problems, file)
        return fields

    def vocab_size_of(self, config: Json, file: str) -> int:
        """Returns the number of rows of the embedding by config.json, completed. Raises UserError, naming `file`, if it
        does not say it."""
        if "vocab_size" not in config:
            raise UserError(f"{file}: vocab_size is missing; it must be an integer")
        return int(config["vocab_size"])

    def notes(self, config: Json) -> list[str]:
        """Returns a sentence for each key of config.json, completed, that has a value without effect."""
        return [note for rule in self.rules if (note := rule.note(config)) is not None]

    def config_of(self, values: Values) -> dict[str, Json]:
        """Returns the keys of config.json for all values of a run, as far as the family can express these."""
        keys: dict[str, Json] = {"architectures": [self.architecture], "model_type": self.model_type}
        for rule in self.rules:
            keys |= rule.keys(values)
        return keys

    def is_constant(self, name: str) -> bool:
        """Whether the hub tensor of this name is in a file without being a weight of this class."""
        return any(re.fullmatch(pattern, name) for pattern in self.constants)

    def current_name(self, name: str) -> str:
        """Returns the name that today's transformers gives to the hub tensor of this name."""
        for pattern, replacement in self.old_names:
            name = re.sub(pattern, replacement, name)
        return name


def _raise_all(problems: Sequence[str], file: str) -> None:
    if problems:
        raise UserError("\n".join(f"{file}: {problem}" for problem in problems))
