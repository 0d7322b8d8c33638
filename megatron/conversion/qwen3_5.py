"""The text models of Qwen3.5: the layers of Qwen3-Next with dense MLPs. The projections of a delta net are four
tensors, each with all queries before all keys before all values."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder
from megatron.conversion.decoder import HUB, OURS
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import HUB_DEFAULTS
from megatron.conversion.qwen3_next import RULES, delta_net, queries_with_gates
from megatron.conversion.tensor_mapping import ALL, HubTensorPattern, TensorMapping

_OF_EXPERTS = ("experts", "moe_", "decoder_sparse", "mlp_only", "norm_topk", "use_sliding", "shared_expert")


def _tensors(values: rules.Values) -> TensorMapping:
    keys = values["linear_key_head_dim"]
    shared = values["linear_num_value_heads"] // values["linear_num_key_heads"]
    ends = [keys, 2 * keys, 2 * keys + shared * values["linear_value_head_dim"]]
    ends += [ends[-1] + shared * values["linear_value_head_dim"]]
    ends += [ends[-1] + shared, ends[-1] + 2 * shared]
    q, k, v, z, b, a = ((ALL, slice(begin, end)) for begin, end in zip([0, *ends], ends, strict=False))
    hub = f"{HUB}.linear_attn"
    return (
        decoder.AROUND
        | decoder.ATTENTION
        | decoder.OUTPUT_BIAS
        | decoder.HEAD_NORMS
        | queries_with_gates(values)
        | delta_net(values)
        | {
            f"{OURS}.self_attention.in_proj.weight": (
                HubTensorPattern(f"{hub}.in_proj_qkv.weight", q, fused=(k, v)),
                HubTensorPattern(f"{hub}.in_proj_z.weight", z),
                HubTensorPattern(f"{hub}.in_proj_b.weight", b),
                HubTensorPattern(f"{hub}.in_proj_a.weight", a),
            )
        }
        | decoder.MLP
    )


QWEN3_5_FAMILY = Family(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    _tensors,
    RULES,
    defaults={
        key: value
        for key, value in HUB_DEFAULTS["qwen3_next"].items()
        if not any(part in key for part in _OF_EXPERTS) and key != "num_experts_per_tok"
    }
    | {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    constants=(r"mtp\..*",),
)
