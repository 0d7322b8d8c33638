"""Multimodal folders: the text part is imported, as a model of its own class. The parts for images are left out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron.conversion.family import HEAD
from megatron.conversion.hub_defaults import Json
from megatron.conversion.model_folder import ModelFolder
from megatron.core.exceptions import UserError

_TEXT_KEYS = "text_config"
_OF_IMAGES = re.compile(r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector)\..*")
_PREFIXES = ((re.compile(r"^language_model\."), ""), (re.compile(r"^model\.language_model\."), "model."))
"""Prefixes of the text part's tensors, of which releases of transformers write one or the other."""


@dataclass(frozen=True)
class TextPart:
    """A multimodal class of transformers, and the class of its text part alone."""

    architecture: str
    model_type: str
    """Value of `model_type` in config.json."""
    text_architecture: str
    text_type: str
    """Value of `model_type` in `text_config`."""
    is_tied: bool
    """Whether the class ties the output layer to the embedding if config.json does not say it."""
    is_causal: bool = True
    """Whether AutoModelForCausalLM of transformers knows its config.json."""

    def config(self, config: Json, file: str) -> dict[str, Json]:
        """Returns the keys of the text part's config.json. Raises UserError, naming `file`, if it has no such part."""
        text = config.get(_TEXT_KEYS)
        if not isinstance(text, Mapping):
            raise UserError(f"{file}: {_TEXT_KEYS} is {text!r}; {self.architecture} needs an object of its text model")
        kind = text.get("model_type", self.text_type)
        if kind != self.text_type or config.get("model_type", self.model_type) != self.model_type:
            raise UserError(
                f"{file}: model_type is {config.get('model_type')!r}, with {kind!r} in {_TEXT_KEYS}; of "
                f"{self.architecture}, {self.model_type!r} with {self.text_type!r} is supported"
            )
        return {**text, "architectures": [self.text_architecture]}

    def folder(self, whole: ModelFolder, file: str) -> ModelFolder:
        """Returns the folder with the config and the tensors of its text part.

        The class ties the output layer by the outer `tie_word_embeddings`, so files without a weight of that layer are
        tied even if `text_config` says otherwise.
        """
        tensors = {_name(name): place for name, place in whole.tensors.items() if not _OF_IMAGES.fullmatch(name)}
        config = self.config(whole.config, file)
        if HEAD not in tensors and whole.config.get("tie_word_embeddings", self.is_tied):
            config["tie_word_embeddings"] = True
        return replace(whole, config=config, tensors=tensors)


def _name(name: str) -> str:
    for prefix, replacement in _PREFIXES:
        name = prefix.sub(replacement, name)
    return name


_PARTS = (
    TextPart("Gemma3ForConditionalGeneration", "gemma3", "Gemma3ForCausalLM", "gemma3_text", is_tied=True),
    TextPart("Llama4ForConditionalGeneration", "llama4", "Llama4ForCausalLM", "llama4_text", is_tied=False),
    TextPart(
        "Mistral3ForConditionalGeneration", "mistral3", "MistralForCausalLM", "mistral", is_tied=True, is_causal=False
    ),
    TextPart("Qwen3_5ForConditionalGeneration", "qwen3_5", "Qwen3_5ForCausalLM", "qwen3_5_text", is_tied=False),
)
TEXT_PARTS: Mapping[str, TextPart] = {part.architecture: part for part in _PARTS}
"""By the multimodal class."""
