"""Cohere (Command R) and Cohere 2 (Command R7B, Command A): attention beside the MLP, behind one norm without bias."""

from dataclasses import dataclass

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder, layer_rules
from megatron.conversion.decoder import HUB, OURS
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.layer_types import WindowsByLayerType
from megatron.conversion.rope import RotaryPositions
from megatron.conversion.tensor_mapping import HubTensorPattern, TensorMapping

_TENSORS = (
    decoder.ENDS | decoder.weights({"input_layernorm": "input_layernorm"}) | decoder.BIASED_ATTENTION | decoder.MLP
)


def _with_head_norms(values: rules.Values) -> TensorMapping:
    """Returns the tensors of Cohere 1, whose norms of queries and keys have a row of weights for each head."""
    norms = {f"{OURS}.self_attention.{name}_layernorm.weight": f"{HUB}.self_attn.{name}_norm.weight" for name in "qk"}
    width = values["kv_channels"]
    return _TENSORS | {ours: (HubTensorPattern(hub, columns=width),) for ours, hub in norms.items()}


_RULES: tuple[rules.Rule, ...] = (
    *decoder.SIZES,
    *decoder.SWIGLU,
    *rules.copied("logit_scale", layer_norm_eps="layernorm_epsilon"),
    layer_rules.AttentionHeads(),
    layer_rules.ATTENTION_BIASES,
    RotaryPositions(),
    rules.Implied({"normalization": "LayerNorm", "norm_bias": False, "norm_placement": "parallel"}),
    rules.Implied({"rotary_interleaved": True}),
)


@dataclass(frozen=True)
class NoPositionsWithoutWindow(rules.Rule):
    """Only layers with a window have rotary positions. It comes after the rule of the windows."""

    windows: WindowsByLayerType

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys of the windows."""
        return self.windows.reads

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the layers without rotary positions."""
        windowed = self.windows.fields(config).get("window_attn_skip_freq", [0] * config["num_hidden_layers"])
        return {"no_rope_freq": None if windowed is None else [1 - layer for layer in windowed]}


_WINDOWS = WindowsByLayerType(period=4, period_key="sliding_window_pattern")

COHERE_FAMILIES = (
    Family(
        "CohereForCausalLM",
        "cohere",
        _with_head_norms,
        (*_RULES, rules.Switch("use_qk_norm", {"qk_layernorm": True, "qk_norm_scope": "per_head"})),
    ),
    Family(
        "Cohere2ForCausalLM",
        "cohere2",
        _TENSORS,
        (*_RULES, _WINDOWS, NoPositionsWithoutWindow(_WINDOWS), rules.Unused(("_sliding_window_pattern",))),
    ),
)
