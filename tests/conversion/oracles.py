"""Tiny models of transformers with random weights, and their logits."""

import contextlib
import dataclasses
import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers
from conversion.family_models import FAMILY_MODELS

from megatron.conversion import hub_defaults
from megatron.conversion.families import family_of
from megatron.conversion.family import Family

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 24}),
    "llama 3.2": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama 3 of other numbers": (
        "Llama",
        {
            "rope_parameters": LLAMA3
            | {"factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0, "original_max_position_embeddings": 32}
        },
    ),
    "llama with all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, positions interpolated": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
    ),
    "llama with gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama with exact gelu": ("Llama", {"hidden_act": "gelu", "mlp_bias": True}),
    "llama with swish": ("Llama", {"hidden_act": "swish"}),
    "llama, positions that grow with the row": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 3000.0, "factor": 2.5}}
        | {"max_position_embeddings": 12},
    ),
    "llama with a divisor for each frequency": (
        "Llama",
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0, 1.1, 1.3, 1.7],
                "long_factor": [1.5, 2.5, 4.0, 7.5],
            },
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen 2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen 2 with windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen 2.5 in yarn": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral with windows": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 7}),
    "qwen 3 moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "qwen 3 moe, mixed layers": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen 3": ("Qwen3", {"head_dim": 32, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}),
    "qwen 3 with biases and windows": (
        "Qwen3",
        {"attention_bias": True, "head_dim": 12, "use_sliding_window": True, "sliding_window": 7}
        | {"max_window_layers": 1},
    ),
    "qwen 3 moe with windows": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "sliding_window": 7}
        | {"use_sliding_window": True, "attention_bias": True, "max_window_layers": 2},
    ),
    "qwen 3 moe with biases": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "attention_bias": True},
    ),
    **FAMILY_MODELS,
}


_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
_OTHER_SIZES: dict[str, dict[str, Any]] = {
    "GPT2": {"vocab_size": 99, "attn_implementation": "eager", **_GPT2},
    "GPTBigCode": {"vocab_size": 99, "attn_implementation": "eager", **_GPT2},
    "GPTNeoX": {name: value for name, value in SIZES.items() if name != "num_key_value_heads"},
    "Falcon": {
        name: value for name, value in SIZES.items() if name not in ("intermediate_size", "num_key_value_heads")
    },
    "Phi3": {**SIZES, "pad_token_id": 0},
    "Mamba2": {},
    "NemotronH": {"attn_implementation": "eager"},
}


def settings_of(name: str) -> dict[str, Any]:
    """Returns the fields of the config of a model of MODELS."""
    kind, settings = MODELS[name]
    return _OTHER_SIZES.get(kind, SIZES) | settings


def architecture_of(kind: str) -> str:
    """Returns the class of transformers."""
    return "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"


def config_class_of(kind: str) -> Any:
    """Returns the class of its config."""
    return getattr(transformers, f"{kind}TextConfig" if kind in ("Gemma3", "Qwen3_5", "Llama4") else f"{kind}Config")


def make_model(name: str, dtype: torch.dtype = torch.float64, seed: int = 1, **changes: Any) -> Any:
    """Returns a model in evaluation mode. All weights, those of norms and biases too, are random."""
    return make_model_of(MODELS[name][0], settings_of(name) | changes, dtype, seed)


def make_model_of(family: str, settings: dict[str, Any], dtype: torch.dtype, seed: int) -> Any:
    """A model of a family of transformers with these settings, as `make_model`."""
    config = config_class_of(family)(**settings)
    return randomise(getattr(transformers, architecture_of(family))(config), dtype, seed)


def randomise(model: Any, dtype: torch.dtype, seed: int) -> Any:
    """Gives a model of transformers this type and random weights; returns it in evaluation mode."""
    model = model.to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    biases = [(key, bias) for key, bias in model.named_buffers() if key.endswith("e_score_correction_bias")]
    for key, weight in [*model.named_parameters(), *biases]:
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        is_norm = weight.dim() == 1 and key.endswith("weight")
        weight.data.copy_(drawn * 0.2 + 1.0 if is_norm else drawn * 0.15)
    return model


def save_model(model: Any, folder: Path, **options: Any) -> Path:
    """Saves a model as transformers does; returns the folder."""
    model.save_pretrained(folder, **options)
    return folder


def random_settings(seed: int) -> tuple[str, dict[str, Any]]:
    """Returns a family and random sizes."""
    draw = random.Random(seed)
    family = draw.choice(["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe"])
    groups = draw.choice([1, 2, 3])
    heads = groups * draw.choice([1, 2, 3])
    settings: dict[str, Any] = SIZES | {
        "vocab_size": draw.randrange(50, 99),
        "hidden_size": heads * draw.choice([5, 8, 12]),
        "intermediate_size": draw.randrange(20, 60),
        "num_hidden_layers": draw.choice([1, 2, 4]),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": draw.choice([8, 20]),
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([500.0, 10000.0, 500000.0])},
    }
    if family in ("Mistral", "Mixtral"):
        settings["sliding_window"] = draw.choice([None, 3, 9])
    if family in ("Mixtral", "Qwen3Moe"):
        experts = draw.randrange(2, 6)
        settings |= {"num_local_experts": experts, "num_experts_per_tok": draw.randrange(2, experts + 1)}
    if family == "Qwen3Moe":
        settings |= {"norm_topk_prob": draw.random() < 0.5, "moe_intermediate_size": draw.randrange(10, 30)}
        settings |= {"decoder_sparse_step": draw.choice([1, 2])}
    return family, settings


class Widened(TorchFunctionMode):
    """Context in which norms, softmaxes and routers of transformers compute in float64 where they ask for float32.

    Rotary angles stay in float32, as ours do: transformers asks for them with `.to(dtype=...)`, or with `.float()` for
    integers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        if func is torch.polar:  # DeepSeek-V2's rotation, whose float32 cosines would differ in the last bit
            return torch.complex(args[1].cos() * args[0], args[1].sin() * args[0])
        if func is Tensor.to and args[0].dim() == 3 and (kwargs or {}).get("dtype") is torch.float32:
            return args[0]  # of OLMo's norm
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = dict(kwargs or {})
        if func is not Tensor.to and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Returns logits [b, s, vocabulary], computed in the model's type; experts are computed one by one."""
    return outputs_of(model, input_ids=tokens).logits


def outputs_of(model: Any, **arguments: Any) -> Any:
    """Returns the outputs of a model for these arguments, as `logits_of`, with a graph for gradients."""
    model.set_experts_implementation("eager")
    with Widened() if model.dtype == torch.float64 else contextlib.nullcontext():
        return model(**arguments)


def some_tokens(vocab_size: int = 99) -> Tensor:
    """Returns random token ids [2, 17], always the same."""
    return torch.randint(vocab_size, (2, 17), generator=torch.Generator().manual_seed(3))


def sizes_of(family: Family) -> dict[str, int]:
    """Returns the sizes of the default model of a family's class, which its config.json must say."""
    if family.model_type == "nemotron-nas":  # without a class, a Llama with other layers
        return sizes_of(family_of("LlamaForCausalLM"))
    if family.model_type in ("baichuan", "chatglm"):
        return {}
    fields = dataclasses.fields(type(transformers.AutoConfig.for_model(family.model_type)))
    sizes = {
        field.name: field.default for field in fields if field.name in hub_defaults.SIZES - family.all_defaults.keys()
    }
    return {key: 6 if size is None else size for key, size in sizes.items()}  # DeepSeek-V2 has no number of experts
