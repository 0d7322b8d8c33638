"""The architectures that can be converted, as data."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.exceptions import UserError
from megatron.training.conversion.pieces import GATE, KEYS, QUERIES, UP, VALUES, Piece, PieceTable
from megatron.training.conversion.rope import Rope
from megatron.training.conversion.settings import (
    Always,
    Biases,
    Heads,
    Json,
    Only,
    Router,
    Rule,
    Same,
    SparseLayers,
    Tied,
    Values,
    Windows,
)

# ---------------------------------------------------------------------------------------------------------------------
# Tensors

Pieces = dict[str, tuple[Piece, ...]]

_OURS, _THEIRS = "decoder.layers.{layer}", "model.layers.{layer}"

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_AROUND: Pieces = {
    "embedding.word_embeddings.weight": (Piece(EMBEDDING),),
    "decoder.final_layernorm.weight": (Piece("model.norm.weight"),),
    "output_layer.weight": (Piece(HEAD),),
    f"{_OURS}.input_layernorm.weight": (Piece(f"{_THEIRS}.input_layernorm.weight"),),
    f"{_OURS}.pre_mlp_layernorm.weight": (Piece(f"{_THEIRS}.post_attention_layernorm.weight"),),
}


def _qkv(kind: str) -> tuple[Piece, ...]:
    parts = {"q": QUERIES, "k": KEYS, "v": VALUES}
    return tuple(Piece(f"{_THEIRS}.self_attn.{name}_proj.{kind}", part) for name, part in parts.items())


_ATTENTION: Pieces = {
    f"{_OURS}.self_attention.linear_qkv.weight": _qkv("weight"),
    f"{_OURS}.self_attention.linear_proj.weight": (Piece(f"{_THEIRS}.self_attn.o_proj.weight"),),
}
_QKV_BIAS: Pieces = {f"{_OURS}.self_attention.linear_qkv.bias": _qkv("bias")}
_OUTPUT_BIAS: Pieces = {f"{_OURS}.self_attention.linear_proj.bias": (Piece(f"{_THEIRS}.self_attn.o_proj.bias"),)}
_HEAD_NORMS: Pieces = {
    f"{_OURS}.self_attention.q_layernorm.weight": (Piece(f"{_THEIRS}.self_attn.q_norm.weight"),),
    f"{_OURS}.self_attention.k_layernorm.weight": (Piece(f"{_THEIRS}.self_attn.k_norm.weight"),),
}


def _gated(ours: str, theirs: str, gate: str, up: str, down: str) -> Pieces:
    return {
        f"{ours}.linear_fc1.{kind}": (Piece(f"{theirs}.{gate}.{kind}", GATE), Piece(f"{theirs}.{up}.{kind}", UP))
        for kind in ("weight", "bias")
    } | {f"{ours}.linear_fc2.{kind}": (Piece(f"{theirs}.{down}.{kind}"),) for kind in ("weight", "bias")}


_MLP = _gated(f"{_OURS}.mlp", f"{_THEIRS}.mlp", "gate_proj", "up_proj", "down_proj")


def _experts(block: str, gate: str, up: str, down: str) -> Pieces:
    theirs = f"{_THEIRS}.{block}"
    router = {f"{_OURS}.mlp.router.weight": (Piece(f"{theirs}.gate.weight"),)}
    return router | _gated(f"{_OURS}.mlp.experts", f"{theirs}.experts.{{expert}}", gate, up, down)


# ---------------------------------------------------------------------------------------------------------------------
# Settings

_SIZES: tuple[Rule, ...] = (
    Same("num_hidden_layers", "num_layers"),
    Same("hidden_size", "hidden_size"),
    Same("max_position_embeddings", "max_position_embeddings"),
    Only("hidden_act", "silu"),
    Always({"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "hidden_dropout": 0.0}),
    Same("attention_dropout", "attention_dropout", 0.0),
    Same("initializer_range", "init_method_std", 0.02),
    Tied(),
    Same("intermediate_size", "ffn_hidden_size"),
)
_EPSILON = Same("rms_norm_eps", "layernorm_epsilon", 1e-6)
_EXPERTS: tuple[Rule, ...] = (
    Same("num_experts_per_tok", "moe_router_topk", 2),
    Always({"moe_router_score_function": "softmax"}),
)

_ABOUT_FILES = ("_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype", "vocab_size")
_ABOUT_USE = ("bos_token_id", "eos_token_id", "pad_token_id", "output_attentions", "output_hidden_states", "use_cache")
_ABOUT_PROGRAMS = ("pretraining_tp", "return_dict", "torchscript", "transformers_version")
_ABOUT_TRAINING = ("output_router_logits", "router_aux_loss_coef")
_WITHOUT_MEANING = frozenset((*_ABOUT_FILES, *_ABOUT_USE, *_ABOUT_PROGRAMS, *_ABOUT_TRAINING))
"""Keys that do not make the model another one; what is about training, a run's own flags say."""


@dataclass(frozen=True)
class Family:
    """An architecture of transformers."""

    architecture: str
    """Name of its class."""
    model_type: str
    tensors: PieceTable
    rules: tuple[Rule, ...]
    left_out: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    """Patterns of tensors on disk that are no weights: constants which old releases stored."""

    @property
    def has_experts(self) -> bool:
        """Whether its layers, some at least, have experts."""
        return any("router" in name for name in self.tensors)

    def values(self, config: Json, waived: Sequence[str] = ()) -> dict[str, Any]:
        """Our fields for what config.json says. Raises UserError with everything that cannot be had; keys that nobody
        here knows are among that, unless `waived`."""
        known = {key for rule in self.rules for key in rule.reads} | _WITHOUT_MEANING | set(waived)
        unknown = sorted(key for key, value in config.items() if key not in known and value is not None)
        problems = [f"config.json: {key} is not known for {self.architecture}" for key in unknown]
        values: dict[str, Any] = {}
        for rule in self.rules:
            try:
                values |= rule.fields(config)
            except UserError as error:
                problems.append(str(error))
        if problems:
            raise UserError("\n".join(problems))
        return values

    def config(self, values: Values) -> dict[str, Json]:
        """The keys of config.json for our fields, as far as the family can say them."""
        keys: dict[str, Json] = {"architectures": [self.architecture], "model_type": self.model_type}
        for rule in self.rules:
            keys |= rule.keys(values)
        return keys

    def leaves_out(self, name: str) -> bool:
        """Whether a tensor on disk is no weight."""
        return any(re.fullmatch(pattern, name) for pattern in self.left_out)


FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        _AROUND | _ATTENTION | _QKV_BIAS | _OUTPUT_BIAS | _MLP,
        (*_SIZES, Heads(), Rope(), _EPSILON, Biases()),
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        _AROUND | _ATTENTION | _MLP,
        (*_SIZES, Heads(), Rope(), _EPSILON, Windows()),
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        _AROUND | _ATTENTION | _QKV_BIAS | _MLP,
        (
            *_SIZES,
            Heads(),
            Rope(),
            _EPSILON,
            Always({"add_qkv_bias": True}),
            Windows(by_layer=True),
            Only("use_mrope", False, write=False),
        ),
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        _AROUND | _ATTENTION | _HEAD_NORMS | _MLP,
        (
            *_SIZES,
            Heads(width=128),
            Rope(),
            _EPSILON,
            Only("attention_bias", False),
            Always({"qk_layernorm": True}),
            Windows(by_layer=True),
        ),
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        _AROUND | _ATTENTION | _experts("block_sparse_moe", "w1", "w3", "w2"),
        (
            *_SIZES,
            Heads(),
            Rope(1000000.0),
            Same("rms_norm_eps", "layernorm_epsilon", 1e-5),
            Windows(),
            Same("num_local_experts", "num_moe_experts"),
            Only("router_jitter_noise", 0.0),
            *_EXPERTS,
        ),
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _AROUND | _ATTENTION | _HEAD_NORMS | _MLP | _experts("mlp", "gate_proj", "up_proj", "down_proj"),
        (
            *_SIZES,
            Heads(),
            Rope(),
            _EPSILON,
            Only("attention_bias", False),
            Always({"qk_layernorm": True}),
            Windows(by_layer=True),
            Only("use_sliding_window", False),  # of which layers, releases of transformers do not agree
            Same("num_experts", "num_moe_experts", also="num_local_experts"),
            Same("moe_intermediate_size", "moe_ffn_hidden_size"),
            SparseLayers(),
            Router(),
            *_EXPERTS,
        ),
    ),
)
"""In the order in which an export looks for one that can say what a model is."""


def family_of(architecture: str) -> Family:
    """The family of that name. Raises UserError naming those that there are."""
    for family in FAMILIES:
        if architecture == family.architecture:
            return family
    raise UserError(f"{architecture}: not known; {', '.join(family.architecture for family in FAMILIES)} are")
