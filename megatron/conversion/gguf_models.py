"""The architectures that can be written as GGUF: their settings and tensors, as llama.cpp reads them.

A setting is a pair of the key in GGUF, without the architecture's name, and its value. llama.cpp computes a fixed
function for each architecture, so a model whose config.json asks for another one is refused.
Source: the specification of GGUF in the repository ggml (docs/gguf.md).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron.conversion.family import HEAD, TIE
from megatron.conversion.hub_defaults import Json
from megatron.conversion.model_folder import ModelFolder
from megatron.core.dist_checkpointing.safetensors_file import TensorInFile, read_tensor
from megatron.core.exceptions import UserError
from megatron.core.ops.rope_frequencies import llama3_frequencies, plain_frequencies

Setting = tuple[str, int | float | str]
_SILU = {"hidden_act": ("silu", "swish")}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_HEADS = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")
_TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, and the models of transformers that it computes."""

    name: str
    fixed: Mapping[str, tuple[Json, ...]] = field(default_factory=dict)
    """Values of config.json that llama.cpp computes, by key. Others are refused."""
    rotates_neighbours: bool = False
    """Whether elements 2i and 2i + 1 of a head are rotated together, and not i and i + half, as in transformers."""
    has_rope_factors: bool = False
    """Whether a tensor may divide each rotary frequency, as Llama 3.1 needs."""


_LLAMA = Architecture("llama", _SILU, rotates_neighbours=True, has_rope_factors=True)
ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": Architecture("qwen2", _SILU),
    "Qwen3ForCausalLM": Architecture("qwen3", _SILU | {"attention_bias": (False,)}),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3moe",
        _SILU
        | {"attention_bias": (False,), "norm_topk_prob": (True,), "decoder_sparse_step": (1,)}
        | {"mlp_only_layers": ([], None)},
    ),
    "GPT2LMHeadModel": Architecture(
        "gpt2",
        {"activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "scale_attn_weights": (True,)}
        | {"scale_attn_by_inverse_layer_idx": (False,)},
    ),
}
"""By class of transformers."""


def architecture_of(config: Json, file: str) -> Architecture:
    """Returns the architecture for a completed config.json. Raises UserError naming the known ones, or all keys whose
    values llama.cpp does not compute."""
    name = config["architectures"][0]
    if name not in ARCHITECTURES:
        raise UserError(f"--to-gguf: {name} cannot be written as GGUF; these can: {', '.join(ARCHITECTURES)}")
    found, problems = ARCHITECTURES[name], []
    for key, known in found.fixed.items():
        if config.get(key) not in known:
            words = " or ".join(map(repr, known))
            problems.append(f"--to-gguf: {key} is {config.get(key)!r}; llama.cpp's {found.name} has {words}")
    scaling = rope_of(config)
    kind = scaling.get("rope_type", "default")
    kinds = ["default", "linear", "yarn", *(["llama3"] if found.has_rope_factors else [])]
    if kind not in kinds:
        problems.append(f"--to-gguf: rope_type is {kind!r}; llama.cpp's {found.name} has {', '.join(kinds)}")
    usual: dict[str, tuple[Json, ...]] = {"beta_fast": (32,), "beta_slow": (1,), "truncate": (True,)}
    usual |= {"attention_factor": (), "mscale": (), "mscale_all_dim": ()}
    for key, values in usual.items() if kind == "yarn" else ():
        if scaling.get(key) not in (None, *values):
            problems.append(f"--to-gguf: {key} of yarn is {scaling[key]!r}; only the usual value can be written")
    if problems:
        raise UserError("\n".join(f"{file}: {problem}" for problem in problems))
    return found


def rope_of(config: Json) -> dict[str, Json]:
    """Returns the rotary base and scaling of a completed config.json, under the keys of transformers 5."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    return {"rope_theta": config.get("rope_theta", 10000.0), "rope_type": rope.pop("type", "default")} | rope


def settings_of(config: Json, log: Callable[[str], object]) -> Iterator[Setting]:
    """Yields the settings of the model, for a completed config.json."""
    if config["architectures"] == ["GPT2LMHeadModel"]:
        yield "context_length", config["n_positions"]
        yield "embedding_length", config["n_embd"]
        yield "feed_forward_length", config["n_inner"] or 4 * config["n_embd"]
        yield "block_count", config["n_layer"]
        yield "attention.head_count", config["n_head"]
        yield "attention.layer_norm_epsilon", float(config["layer_norm_epsilon"])
        return
    heads = config["num_attention_heads"]
    width = head_width(config)
    yield "context_length", _context_length(config, log)
    yield "embedding_length", config["hidden_size"]
    yield "feed_forward_length", config["intermediate_size"]
    yield "block_count", config["num_hidden_layers"]
    yield "attention.head_count", heads
    yield "attention.head_count_kv", config["num_key_value_heads"] or heads
    yield "attention.key_length", width
    yield "attention.value_length", width
    yield "attention.layer_norm_rms_epsilon", float(config["rms_norm_eps"])
    rope = rope_of(config)
    yield "rope.dimension_count", width
    yield "rope.freq_base", float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        yield "rope.scaling.type", rope["rope_type"]
        yield "rope.scaling.factor", float(rope["factor"])
    if rope["rope_type"] == "yarn":
        original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        yield "rope.scaling.original_context_length", original
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        yield "expert_count", experts
        yield "expert_used_count", config["num_experts_per_tok"]
    if config.get("moe_intermediate_size"):
        yield "expert_feed_forward_length", config["moe_intermediate_size"]


def head_width(config: Json) -> int:
    """Returns the width of a head of queries and keys."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _context_length(config: Json, log: Callable[[str], object]) -> int:
    """Returns the longest text that llama.cpp computes as the model does: it has no windows for these architectures,
    and a text that fits into a window does not need one."""
    length, window = int(config["max_position_embeddings"]), config.get("sliding_window")
    if not window or window >= length or config.get("use_sliding_window") is False:
        return length
    log(f"llama.cpp computes no windows here: the context length is {window}, the width of the model's window")
    return int(window)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file."""

    name: str
    shape: tuple[int, ...]
    """Shape with the slowest dimension first, as in torch."""
    values: Callable[[], Tensor]
    """Returns the elements in this shape."""


def tensors_of(
    architecture: Architecture, config: Json, folder: ModelFolder, name_of: Callable[[str], str | None]
) -> list[GgufTensor]:
    """Returns the tensors for llama.cpp. `name_of` gives the GGUF name of a module of transformers, without number and
    without suffix, or None."""
    groups: dict[str, list[TensorInFile]] = {}
    for name in sorted(folder.tensors, key=_in_order):
        if name == HEAD and config[TIE]:
            continue  # a copy of the embedding
        groups.setdefault(_EXPERT.sub(".experts.", name), []).append(folder.tensors[name])
    tensors = [_tensor(architecture, config, name, places, name_of) for name, places in groups.items()]
    rope = rope_of(config)
    if rope["rope_type"] == "llama3":
        factors = _llama3_factors(config, rope)
        tensors.append(GgufTensor("rope_freqs.weight", tuple(factors.shape), lambda: factors))
    return tensors


def _in_order(name: str) -> list[int | str]:
    """A key of sorting that orders layers and experts by number."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _tensor(
    architecture: Architecture,
    config: Json,
    name: str,
    places: Sequence[TensorInFile],
    name_of: Callable[[str], str | None],
) -> GgufTensor:
    module, _, suffix = name.rpartition(".")
    found = name_of(module)
    if found is None:
        raise UserError(f"{places[0].path}: llama.cpp's {architecture.name} has no tensor for {name}")
    shape = places[0].shape if "experts" not in module else (len(places), *places[0].shape)
    change: Callable[[Tensor], Tensor] = _unchanged
    heads = _HEADS.search(name)
    if architecture.name == "gpt2" and _TRANSPOSED.search(name):
        shape, change = shape[::-1], torch.t
    elif architecture.rotates_neighbours and heads is not None:
        change = partial(neighbours_first, head_width=head_width(config))
    return GgufTensor(f"{found}.{suffix}", shape, partial(_read, places, shape, change))


def _unchanged(values: Tensor) -> Tensor:
    return values


def _read(places: Sequence[TensorInFile], shape: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> Tensor:
    parts = [change(read_tensor(place)) for place in places]
    return (parts[0] if len(parts) == 1 else torch.stack(parts)).reshape(shape).contiguous()


def neighbours_first(values: Tensor, head_width: int) -> Tensor:
    """Orders the rows of each head of queries or keys so that those that are rotated together, i and i + half, become
    neighbours: [heads head_width, ...] -> the same shape."""
    halves = values.view(-1, 2, head_width // 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def _llama3_factors(config: Json, rope: Json) -> Tensor:
    """Returns the divisor of each rotary frequency, float32 [head width / 2]."""
    plain = plain_frequencies(head_width(config), float(rope["rope_theta"]))
    length = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    scaled = llama3_frequencies(plain, rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], length)
    return (plain / scaled).float()
