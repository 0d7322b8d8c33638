"""GPT-2, whose files have transposed matrices; GPTBigCode (StarCoder 1, SantaCoder), a GPT-2 with keys and values that
all heads share; and rules of models whose MLP has no gate."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.conversion import config_rules as rules
from megatron.conversion.decoder import OURS, one_to_one, with_biases
from megatron.conversion.family import HEAD, Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.spellings import gelu_kind, score_scale
from megatron.conversion.tensor_mapping import HubTensorPattern
from megatron.core.exceptions import UserError

_FIELDS: dict[str, dict[str, bool]] = {
    "gelu_new": {"openai_gelu": True},
    "gelu_pytorch_tanh": {"openai_gelu": True},
    "gelu_fast": {"openai_gelu": True},
    "gelu": {"bias_gelu_fusion": False},
    "relu": {"relu": True},
    "relu2": {"squared_relu": True},
}
"""Words of activations in config.json, and our switches."""


@dataclass(frozen=True)
class UngatedActivation(rules.Rule):
    """Activation of an MLP without a gate."""

    key: str

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the switch of the activation."""
        if config[self.key] not in _FIELDS:
            raise UserError(f"{self.key} is {config[self.key]!r}; {', '.join(_FIELDS)} are supported")
        return dict(_FIELDS[config[self.key]])

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the word of the activation. A gate is left out."""
        others = {"relu": "relu", "squared_relu": "relu2"}
        words = [word for field, word in others.items() if values[field]]
        return {self.key: words[0] if words else "gelu_new" if gelu_kind(values) == "tanh" else "gelu"}


@dataclass(frozen=True)
class WidthOfMLP(rules.Rule):
    """Width of the MLP; null or absent, it is four times the hidden size."""

    key: str
    hidden_key: str

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the width."""
        given = config[self.key]
        return {"ffn_hidden_size": 4 * config[self.hidden_key] if given is None else given}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the width, or null if it is the default."""
        width = values["ffn_hidden_size"]
        return {self.key: None if width == 4 * values["hidden_size"] else width}


@dataclass(frozen=True)
class Gpt2Attention(rules.Rule):
    """Heads without groups, and whether scores are divided by the root of their width."""

    reads: ClassVar[tuple[str, ...]] = ("n_head", "scale_attn_weights")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the heads, and the factor of the scores if it is 1."""
        heads = {"num_attention_heads": config["n_head"], "kv_channels": config["n_embd"] // config["n_head"]}
        return heads if config["scale_attn_weights"] else heads | {"softmax_scale": 1.0}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns both keys."""
        return {"n_head": values["num_attention_heads"], "scale_attn_weights": score_scale(values) != 1.0}


@dataclass(frozen=True)
class EqualDropouts(rules.Rule):
    """Dropout of the embedding and of the residual stream, which is one setting here."""

    of_embedding: str
    of_residual: str

    @property
    def reads(self) -> tuple[str, ...]:
        """The two keys."""
        return (self.of_embedding, self.of_residual)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the probability. Raises UserError if the two differ."""
        embedding, residual = (config[key] for key in self.reads)
        if embedding != residual:
            raise UserError(
                f"{self.of_embedding} is {embedding}, but {self.of_residual} is {residual}; only equal ones are "
                "supported"
            )
        return {"hidden_dropout": residual}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the probability under both names."""
        return dict.fromkeys(self.reads, values["hidden_dropout"])


_GPT2 = "transformer.h.{layer}"
_LAYER_NORMS = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"}
_TRANSPOSED = {
    "self_attention.linear_proj": "attn.c_proj",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
_ENDS = one_to_one(
    {
        "embedding.word_embeddings.weight": "transformer.wte.weight",
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
        "output_layer.weight": HEAD,
    }
) | with_biases({"decoder.final_layernorm": "transformer.ln_f"})
"""What is before and after the layers."""

_RULES: tuple[rules.Rule, ...] = (
    *rules.copied(n_layer="num_layers", n_embd="hidden_size", n_positions="max_position_embeddings"),
    *rules.copied(attn_pdrop="attention_dropout", layer_norm_epsilon="layernorm_epsilon"),
    rules.Copied("initializer_range", "init_method_std"),
    rules.TiedEmbeddings(),
    WidthOfMLP("n_inner", "n_embd"),
    UngatedActivation("activation_function"),
    EqualDropouts("embd_pdrop", "resid_pdrop"),
    rules.Implied(
        {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "add_bias_linear": True}
    ),
    rules.Fixed("add_cross_attention", False, write=False),
)
"""Rules of all models of this form. The heads are not among them."""

GPT2_FAMILY = Family(
    "GPT2LMHeadModel",
    "gpt2",
    _ENDS
    | with_biases({f"{OURS}.{ours}": f"{_GPT2}.{hub}" for ours, hub in _LAYER_NORMS.items()})
    | one_to_one({f"{OURS}.{ours}.bias": f"{_GPT2}.{hub}.bias" for ours, hub in _TRANSPOSED.items()})
    | {
        f"{OURS}.{ours}.weight": (HubTensorPattern(f"{_GPT2}.{hub}.weight", axes=((1,), (0,))),)
        for ours, hub in _TRANSPOSED.items()
    }
    | {  # ours: [heads, 3, head width, hidden size]; theirs: [hidden size, 3 heads head width]
        f"{OURS}.self_attention.linear_qkv.weight": (
            HubTensorPattern(f"{_GPT2}.attn.c_attn.weight", axes=((3,), (1, 0, 2))),
        ),
        f"{OURS}.self_attention.linear_qkv.bias": (HubTensorPattern(f"{_GPT2}.attn.c_attn.bias", axes=((1, 0, 2),)),),
    },
    (
        *_RULES,
        Gpt2Attention(),
        rules.Fixed("scale_attn_by_inverse_layer_idx", False),
        rules.Unused(("reorder_and_upcast_attn", "n_ctx", "task_specific_params", "summary_type", "summary_use_proj")),
        rules.Unused(
            ("summary_activation", "summary_proj_to_labels", "summary_first_dropout", "gradient_checkpointing")
        ),
    ),
    constants=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    copies={HEAD: "transformer.wte.weight"},
    old_names=((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
)

_MODULES = {
    "input_layernorm": "ln_1",
    "pre_mlp_layernorm": "ln_2",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


@dataclass(frozen=True)
class SharedKeys(Gpt2Attention):
    """Heads, which may all share one key and one value."""

    reads = (*Gpt2Attention.reads, "multi_query", "num_key_value_heads")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns heads and groups, and the factor of the scores if it is 1."""
        shared = config["multi_query"] and config["n_head"] > 1
        return super().fields(config) | ({"group_query_attention": True, "num_query_groups": 1} if shared else {})

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the keys. Other groups are left out."""
        groups = values["num_query_groups"]
        return super().keys(values) | {"multi_query": groups == 1, "num_key_value_heads": groups}


GPT_BIGCODE_FAMILY = Family(
    "GPTBigCodeForCausalLM",
    "gpt_bigcode",
    _ENDS | with_biases({f"{OURS}.{ours}": f"transformer.h.{{layer}}.{hub}" for ours, hub in _MODULES.items()}),
    (
        *_RULES,
        SharedKeys(),
        rules.Unused(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner")),
        rules.Unused(("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")),
        rules.Unused(("summary_first_dropout", "validate_runner_input", "pre_allocate_kv_cache", "max_batch_size")),
        rules.Unused(("max_sequence_length", "n_ctx")),
    ),
    constants=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    copies={HEAD: "transformer.wte.weight"},
)
