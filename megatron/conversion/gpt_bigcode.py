"""GPTBigCode (StarCoder 1, SantaCoder): GPT-2 with keys and values that all heads share. Its joint tensor of queries,
keys and values has our layout."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, gpt2
from megatron.conversion.decoder import OURS
from megatron.conversion.family import HEAD, Family
from megatron.conversion.hub_defaults import HUB_DEFAULTS, Json
from megatron.conversion.spellings import score_scale

_MODULES = {
    "input_layernorm": "ln_1",
    "pre_mlp_layernorm": "ln_2",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


@dataclass(frozen=True)
class SharedKeys(rules.Rule):
    """Heads, whether they share keys and values, and whether scores are divided by the root of their width."""

    reads = ("n_head", "multi_query", "scale_attn_weights", "num_key_value_heads")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns heads and groups, and the factor of the scores if it is 1."""
        heads, shared, scaled = (config[key] for key in self.reads[:3])
        fields = {"num_attention_heads": heads, "kv_channels": config["n_embd"] // heads}
        fields |= {"group_query_attention": True, "num_query_groups": 1} if shared and heads > 1 else {}
        return fields if scaled else fields | {"softmax_scale": 1.0}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the keys. Other groups are left out."""
        heads, groups = values["num_attention_heads"], values["num_query_groups"]
        return {
            "n_head": heads,
            "multi_query": groups == 1,
            "num_key_value_heads": groups,
            "scale_attn_weights": score_scale(values) != 1.0,
        }


GPT_BIGCODE_FAMILY = Family(
    "GPTBigCodeForCausalLM",
    "gpt_bigcode",
    gpt2.ENDS
    | decoder.with_biases({f"{OURS}.{ours}": f"transformer.h.{{layer}}.{hub}" for ours, hub in _MODULES.items()}),
    (
        *gpt2.RULES,
        SharedKeys(),
        rules.Unused(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner")),
        rules.Unused(("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")),
        rules.Unused(("summary_first_dropout", "validate_runner_input", "pre_allocate_kv_cache", "max_batch_size")),
        rules.Unused(("max_sequence_length", "n_ctx")),
    ),
    defaults={key: value for key, value in HUB_DEFAULTS["gpt2"].items() if key != "scale_attn_by_inverse_layer_idx"}
    | {"activation_function": "gelu_pytorch_tanh", "multi_query": True},
    constants=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    copies={HEAD: "transformer.wte.weight"},
)
