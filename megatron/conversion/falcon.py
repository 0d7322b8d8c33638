"""All generations of Falcon. Their joint tensor of queries, keys and values has our layout."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import OURS, one_to_one, with_biases
from megatron.conversion.family import HEAD, Family
from megatron.conversion.gpt2 import UngatedActivation, WidthOfMLP
from megatron.conversion.hub_defaults import Json
from megatron.conversion.rope import RotaryPositions
from megatron.conversion.tensor_mapping import TensorMapping
from megatron.core.exceptions import UserError


@dataclass(frozen=True)
class FalconLayers(rules.Rule):
    """Heads that share keys and values, and where the norms of a layer are.

    The new architecture has any number of key-value heads, and attention beside the MLP, with a norm for each or one
    for both. The old one has one key-value head or as many as query heads, and attention beside the MLP or before it.
    """

    reads = (
        *("num_attention_heads", "num_kv_heads", "multi_query"),
        *("new_decoder_architecture", "parallel_attn", "num_ln_in_parallel_attn"),
    )

    def fields(self, config: Json) -> dict[str, object]:
        """Returns heads and placement. Raises UserError for settings with which transformers has no such layer."""
        heads, groups, multi_query, is_new, parallel, norms = (config[key] for key in self.reads)
        groups = heads if groups is None else groups
        if is_new and not parallel:
            raise UserError("parallel_attn is False; with new_decoder_architecture only True is supported")
        if not is_new and norms == 2:
            raise UserError("num_ln_in_parallel_attn is 2; it needs new_decoder_architecture")
        if not is_new and not multi_query and groups != heads:
            raise UserError(f"num_kv_heads is {groups}; without multi_query only {heads} is supported")
        if not is_new and multi_query:
            groups = 1
        placement = "parallel_two_norms" if is_new and norms in (None, 2) else "parallel" if parallel else "pre"
        return {
            "num_attention_heads": heads,
            "kv_channels": config["hidden_size"] // heads,
            "norm_placement": placement,
            **({} if groups == heads else {"group_query_attention": True, "num_query_groups": groups}),
        }

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns all keys."""
        heads, groups, placement = (
            values[field] for field in ("num_attention_heads", "num_query_groups", "norm_placement")
        )
        has_two = placement == "parallel_two_norms"
        is_new = has_two or (placement == "parallel" and groups not in (1, heads))
        norms = {"num_ln_in_parallel_attn": 2 if has_two else 1} if is_new else {}
        return {
            "num_attention_heads": heads,
            "num_kv_heads": groups if is_new else heads,
            "multi_query": groups != heads,
            "new_decoder_architecture": is_new,
            "parallel_attn": placement != "pre",
            **norms,
        }


@dataclass(frozen=True)
class FalconPositions(RotaryPositions):
    """ALiBi, whose slopes are divided by the root of a head's width as the scores are, or rotary positions."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys."""
        return ("alibi", *super().reads)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the positions."""
        if not config["alibi"]:
            return super().fields(config)
        width = config["hidden_size"] / config["num_attention_heads"]
        return {"position_embedding_type": "none", "alibi": True, "alibi_factor": width**-0.5}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the keys of one or the other."""
        return {"alibi": True} if values["alibi"] else {"alibi": False, **super().keys(values)}

    def note(self, config: Json) -> str | None:
        """Returns a sentence for ALiBi of so many heads that some slopes are no powers of 2."""
        if not config["alibi"] or config["num_attention_heads"] <= 8:
            return None
        return (
            "alibi is True: transformers rounds slopes to bfloat16; here they are exact, so logits differ by about 0.01"
        )


_SAME_ROWS = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}


def _tensors(values: rules.Values) -> TensorMapping:
    """Returns the table. The norms have other names where attention and MLP, side by side, have one each."""
    has_two = values["norm_placement"] == "parallel_two_norms"
    of_layer = _SAME_ROWS | {
        "input_layernorm": "ln_attn" if has_two else "input_layernorm",
        "pre_mlp_layernorm": "ln_mlp" if has_two else "post_attention_layernorm",
    }
    modules = {f"{OURS}.{ours}": f"transformer.h.{{layer}}.{hub}" for ours, hub in of_layer.items()}
    ends = {"embedding.word_embeddings.weight": "transformer.word_embeddings.weight", "output_layer.weight": HEAD}
    return one_to_one(ends) | with_biases({**modules, "decoder.final_layernorm": "transformer.ln_f"})


FALCON_FAMILY = Family(
    "FalconForCausalLM",
    "falcon",
    _tensors,
    (
        *decoder.CORE,
        *rules.copied("hidden_dropout", "attention_dropout", layer_norm_epsilon="layernorm_epsilon"),
        WidthOfMLP("ffn_hidden_size", "hidden_size"),
        UngatedActivation("activation"),
        FalconLayers(),
        layer_rules.Biases("bias"),
        FalconPositions(),
        rules.Implied({"normalization": "LayerNorm"}),
        rules.Fixed("apply_residual_connection_post_layernorm", False, write=False),
    ),
    copies={HEAD: "transformer.word_embeddings.weight"},
)
