"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention to the keys that an indexer selects."""

from dataclasses import dataclass
from functools import partial

from megatron.conversion import config_rules as rules
from megatron.conversion.decoder import HUB, OURS, one_to_one
from megatron.conversion.deepseek import (
    RULES,
    V3_CONSTANTS,
    V3_RULES,
    V3_TENSORS,
    ExpertsAfterDense,
    with_prediction_layers,
)
from megatron.conversion.family import Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.spellings import run_of
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import has_experts

_INDEXER = {
    "linear_wq_b.weight": "wq_b.weight",
    "linear_wk.weight": "wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "linear_weights_proj.weight": "weights_proj.weight",
}
_TENSORS = V3_TENSORS | one_to_one(
    {f"{OURS}.self_attention.indexer.{ours}": f"{HUB}.self_attn.indexer.{hub}" for ours, hub in _INDEXER.items()}
)


@dataclass(frozen=True)
class IndexedLayers(rules.Rule):
    """All layers attend to the keys that an indexer selects. The indexer's queries come from the latent of the
    queries."""

    reads = ("layer_types", "q_lora_rank")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the kind of attention. Raises UserError for layers of another type, and for a model whose queries
        have no latent."""
        others = sorted({str(kind) for kind in config["layer_types"] or ()} - {"indexed_attention"})
        if others:
            raise UserError(f"layer_types has {others[0]!r}; only 'indexed_attention' is supported")
        if config["q_lora_rank"] is None:
            raise UserError("q_lora_rank is None; it must be an integer (--q-lora-rank)")
        return {"experimental_attention_variant": "dsa"}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the type of each layer."""
        return {"layer_types": ["indexed_attention"] * values["num_layers"]}


@dataclass(frozen=True)
class IndexerNorm(rules.Rule):
    """Epsilon of the LayerNorm of the indexer's keys, which is always 1e-6 in transformers."""

    reads = ("rms_norm_eps",)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the epsilon, unless the other norms have it too."""
        return {} if config["rms_norm_eps"] == 1e-6 else {"dsa_indexer_k_norm_epsilon": 1e-6}


@dataclass(frozen=True)
class ExpertsByLayer(rules.Rule):
    """Layers with experts: those that `mlp_layer_types` names; without this key, all layers after the first dense
    ones."""

    reads = (*ExpertsAfterDense.reads, "mlp_layer_types")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns layers and widths. Raises UserError for unknown types of layers, and for a model without shared
        experts."""
        fields = ExpertsAfterDense().fields(config)
        if config["mlp_layer_types"] is None:
            return fields
        kinds = rules.checked_types(config, "mlp_layer_types", _KINDS, " and ".join(_KINDS))
        return fields | {"moe_layer_freq": rules.layers_of([_KINDS.index(kind) for kind in kinds])}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns all keys."""
        config = run_of(values)
        kinds = [_KINDS[has_experts(config, layer + 1)] for layer in range(values["num_layers"])]
        return ExpertsAfterDense().keys(values) | {"mlp_layer_types": kinds}


_KINDS = ("dense", "sparse")

DEEPSEEK_V32_FAMILY = Family(
    "DeepseekV32ForCausalLM",
    "deepseek_v32",
    partial(with_prediction_layers, _TENSORS),
    (
        *(rule for rule in RULES if not isinstance(rule, ExpertsAfterDense)),
        *V3_RULES,
        ExpertsByLayer(),
        IndexedLayers(),
        IndexerNorm(),
        *rules.copied(index_n_heads="dsa_indexer_n_heads", index_head_dim="dsa_indexer_head_dim"),
        rules.Copied("index_topk", "dsa_indexer_topk"),
        rules.Fixed("mlp_bias", False),
    ),
    constants=V3_CONSTANTS,
)
