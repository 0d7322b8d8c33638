"""Granite-MoE: Granite's factors, and experts whose matrices are one tensor each."""

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import HUB_DEFAULTS
from megatron.conversion.tensor_mapping import HubTensorPattern

_BLOCK = f"{HUB}.block_sparse_moe"

GRANITE_MOE_FAMILY = Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    decoder.AROUND
    | decoder.ATTENTION
    | decoder.QKV_BIAS
    | decoder.OUTPUT_BIAS
    | {
        f"{OURS}.mlp.router.weight": (HubTensorPattern(f"{_BLOCK}.router.layer.weight"),),
        f"{OURS}.mlp.experts.linear_fc1.weight": (
            HubTensorPattern(f"{_BLOCK}.input_linear.weight", axes=((0,), (1, 2), (3,))),
        ),
        f"{OURS}.mlp.experts.linear_fc2.weight": (
            HubTensorPattern(f"{_BLOCK}.output_linear.weight", axes=((0,), (1,), (2,))),
        ),
    },
    (
        *decoder.DECODER,
        layer_rules.LinearBiases(mlp=False),
        layer_rules.ScoreScale("attention_multiplier"),
        rules.Copied("embedding_multiplier", "embedding_multiplier"),
        rules.Copied("residual_multiplier", "residual_multiplier"),
        rules.Inverse("logits_scaling", "logit_scale"),
        rules.Copied("intermediate_size", "moe_ffn_hidden_size"),
        rules.Copied("num_local_experts", "num_moe_experts"),
        layer_rules.RouterWeights(key=None),
    ),
    defaults={key: value for key, value in HUB_DEFAULTS["granite"].items() if key != "mlp_bias"}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
)
