"""GPT-NeoX and Pythia. Their joint tensor of queries, keys and values has our layout."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder
from megatron.conversion.decoder import OURS, one_to_one
from megatron.conversion.family import Family
from megatron.conversion.gpt2 import UngatedActivation
from megatron.conversion.hub_defaults import Json
from megatron.conversion.rope import RotaryPositions
from megatron.conversion.spellings import bias_places

_MODULES = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_qkv": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}


@dataclass(frozen=True)
class NeoXLayers(rules.Rule):
    """Heads, and whether attention is beside the MLP, each behind its own norm."""

    reads = ("num_attention_heads", "use_parallel_residual", "attention_bias")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns heads, placement of the norms, and the biases, which the MLP always has."""
        heads, parallel, bias = (config[key] for key in self.reads)
        fields = {
            "num_attention_heads": heads,
            "kv_channels": config["hidden_size"] // heads,
            "norm_placement": "parallel_two_norms" if parallel else "pre",
        }
        if bias:
            return fields | {"add_bias_linear": True}
        return fields | {"add_bias_linear": False, "mlp_bias": True}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns all keys."""
        places = bias_places(values)
        return {
            "num_attention_heads": values["num_attention_heads"],
            "use_parallel_residual": values["norm_placement"] == "parallel_two_norms",
            "attention_bias": places["add_qkv_bias"] and places["attention_output_bias"],
        }


GPT_NEOX_FAMILY = Family(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    one_to_one(
        {"embedding.word_embeddings.weight": "gpt_neox.embed_in.weight", "output_layer.weight": "embed_out.weight"}
    )
    | decoder.with_biases({"decoder.final_layernorm": "gpt_neox.final_layer_norm"})
    | decoder.with_biases({f"{OURS}.{ours}": f"gpt_neox.layers.{{layer}}.{hub}" for ours, hub in _MODULES.items()}),
    (
        *decoder.CORE,
        *rules.copied("hidden_dropout", "attention_dropout", intermediate_size="ffn_hidden_size"),
        rules.Copied("layer_norm_eps", "layernorm_epsilon"),
        UngatedActivation("hidden_act"),
        NeoXLayers(),
        RotaryPositions(rotated_part=0.25, old_part="rotary_pct", old_base="rotary_emb_base"),
        rules.Implied({"normalization": "LayerNorm"}),
        rules.Unused(("classifier_dropout", "is_decoder")),
    ),
    constants=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    copies={"embed_out.weight": "gpt_neox.embed_in.weight"},
)
