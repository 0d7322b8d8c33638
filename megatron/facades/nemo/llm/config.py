"""Sizes of models under NeMo's names: `GPTConfig`, `LlamaConfig`, and those that this package's recipes know."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn.functional import silu

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.facades.nemo.lightning.arguments import Foreign
from megatron.facades.nemo.lightning.flags import Flags
from megatron.facades.nemo.lightning.model_flags import give_transformer
from megatron.training.config.flag_table import flag_table
from megatron.training.config.model import ACTIVATIONS
from megatron.training.config.recipes.catalogue import recipe_named

_SAME_NAME = (
    "fp16_lm_cross_entropy",
    "make_vocab_size_divisible_by",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
)
_HERE = ("layers follow from the other fields; --spec (MegatronStrategy(flags=[...])) builds layers of your own",)


@dataclass(kw_only=True)
class GPTConfig(TransformerConfig):
    """Sizes and options of a GPT. The run sets the layout and the number formats."""

    seq_length: int = 1024
    share_embeddings_and_output_weights: bool = True
    make_vocab_size_divisible_by: int = 128
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    seq_len_interpolation_factor: float | None = None
    scale_factor: float | None = None
    """Llama 3.1's scaling of rotary positions; None: none."""
    fp16_lm_cross_entropy: bool = False
    parallel_output: bool = True
    vocab_size: int | None = None
    """Size of the vocabulary, if text consists of ids; None: that of the tokenizer."""
    transformer_layer_spec: Foreign = None
    forward_step_fn: Callable[..., Tensor] | None = None
    data_step_fn: Callable[..., object] | None = None

    def give_flags(self, flags: Flags) -> None:
        """Adds the settings of the model."""
        give_transformer(flags, self)
        for name in _SAME_NAME:
            flags.give(name, getattr(self, name))
        flags.give("untie_embeddings_and_output_weights", not self.share_embeddings_and_output_weights)
        flags.give("rotary_seq_len_interpolation_factor", self.seq_len_interpolation_factor)
        if self.scale_factor is not None:
            flags.give("use_rope_scaling", True)
            flags.give("rope_scaling_factor", float(self.scale_factor))
        if self.transformer_layer_spec is not None:
            flags.refuse(f"{type(self).__name__}(transformer_layer_spec=...)", _HERE[0])


@dataclass(kw_only=True)
class LlamaConfig(GPTConfig):
    """The options of Llama's models."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    activation_func: Callable[[Tensor], Tensor] = silu
    gated_linear_unit: bool = True
    bias_activation_fusion: bool = True
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "rope"
    add_bias_linear: bool = False
    seq_length: int = 4096
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    share_embeddings_and_output_weights: bool = False


@dataclass(kw_only=True)
class Llama3Config(LlamaConfig):
    """The options of Llama 3's models."""

    num_query_groups: int | None = 8
    init_method_std: float = 0.01
    layernorm_epsilon: float = 1e-05


OF_RECIPES: dict[str, tuple[type[GPTConfig], str]] = {
    "GPTConfig126M": (GPTConfig, "gpt3-125m"),
    "GPTConfig175B": (GPTConfig, "gpt3-175b"),
    **{f"Llama2Config{size}B": (LlamaConfig, f"llama2-{size}b") for size in (7, 13, 70)},
    **{f"Llama3Config{size}B": (Llama3Config, f"llama3-{size}b") for size in (8, 70)},
    **{f"Llama31Config{size}B": (Llama3Config, f"llama3.1-{size}b") for size in (8, 70, 405)},
    **{f"Llama32Config{size}B": (Llama3Config, f"llama3.2-{size}b") for size in (1, 3)},
    "MistralConfig7B": (LlamaConfig, "mistral-7b"),
    "MistralNeMoConfig12B": (LlamaConfig, "mistral-nemo-12b"),
    **{f"MixtralConfig8x{size}B": (LlamaConfig, f"mixtral-8x{size}b") for size in (7, 22)},
    **{f"Nemotron4Config{size}B": (GPTConfig, f"nemotron4-{size}b") for size in (15, 340)},
    "Qwen2Config500M": (LlamaConfig, "qwen2-0.5b"),
    "Qwen2Config1P5B": (LlamaConfig, "qwen2-1.5b"),
    **{f"Qwen2Config{size}B": (LlamaConfig, f"qwen2-{size}b") for size in (7, 72)},
    **{f"Qwen25Config{size}B": (LlamaConfig, f"qwen2.5-{size}b") for size in (7, 14, 32, 72)},
    **{f"Qwen3Config{size}B": (LlamaConfig, f"qwen3-{size}b") for size in (4, 8, 14, 32)},
    **{f"Starcoder2Config{size}B": (GPTConfig, f"starcoder2-{size}b") for size in (7, 15)},
}
"""Classes of NeMo, and the recipe that has their sizes."""


def config_of_recipe(name: str) -> type[GPTConfig]:
    """Returns a class of NeMo by name, whose defaults are the sizes of a recipe. Raises KeyError for another name."""
    base, recipe = OF_RECIPES[name]
    known = {field.name: field for field in dataclasses.fields(base)}
    flags = recipe_named(recipe).flags
    sizes = {
        field: flag_table()[field].parse(value) if isinstance(value, str) else value
        for field, value in flags.items()
        if field in known
    }
    sizes["share_embeddings_and_output_weights"] = not flags.get("untie_embeddings_and_output_weights", False)
    if flags.get("rope_scaling_type") == "llama3":
        sizes["scale_factor"] = flags.get("rope_scaling_factor", 8.0)
    for activation in flags.keys() & ACTIVATIONS.keys():
        sizes["activation_func"] = ACTIVATIONS[activation].function
        sizes["gated_linear_unit"] = ACTIVATIONS[activation].gated
    fields = [(field, known[field].type, dataclasses.field(default=value)) for field, value in sizes.items()]
    made = dataclasses.make_dataclass(name, fields, bases=(base,), kw_only=True)
    made.__module__ = __name__
    made.__doc__ = f"The sizes of the recipe {recipe}."
    return made
