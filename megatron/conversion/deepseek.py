"""DeepSeek-V2 and DeepSeek-V3: latent attention, and experts chosen within groups beside shared experts."""

import dataclasses
from dataclasses import dataclass
from functools import partial

from megatron.conversion import config_rules as rules
from megatron.conversion import decoder
from megatron.conversion.decoder import HUB, OURS, one_to_one
from megatron.conversion.family import PREDICTION_LAYERS, Family
from megatron.conversion.hub_defaults import Json
from megatron.conversion.rope import whole_base
from megatron.conversion.spellings import run_of
from megatron.conversion.tensor_mapping import HubTensorPattern, TensorMapping
from megatron.core.exceptions import UserError
from megatron.core.transformer.layer_patterns import has_experts

_ATTENTION = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
_TENSORS = (
    decoder.AROUND
    | decoder.weights({f"self_attention.{ours}": f"self_attn.{hub}" for ours, hub in _ATTENTION.items()})
    | decoder.MLP
    | decoder.experts("mlp")
    | decoder.shared_experts("mlp.shared_experts")
)


V3_TENSORS: decoder.Mapping = _TENSORS | decoder.expert_bias("mlp.gate.e_score_correction_bias")


def with_prediction_layers(tensors: decoder.Mapping, values: rules.Values) -> TensorMapping:
    """Returns the table of a decoder with that of its layers of multi-token prediction. These are numbered after the
    decoder's, and their files repeat the embedding and the output layer."""
    table, embedding = dict(tensors), "embedding.word_embeddings.weight"
    head = "output_layer.weight" if values["untie_embeddings_and_output_weights"] else embedding
    for depth in range(values["mtp_num_layers"] or 0):
        hub = f"model.layers.{values['num_layers'] + depth}"
        table |= _prediction_layer(tensors, f"mtp.layers.{depth}", hub)
        for name, copy in ((embedding, "embed_tokens"), (head, "shared_head.head")):
            table[name] = (*table[name], HubTensorPattern(f"{hub}.{copy}.weight", is_copy=True))
    return table


def _prediction_layer(tensors: decoder.Mapping, ours: str, hub: str) -> decoder.Mapping:
    """Returns the table of one layer of multi-token prediction: a layer of the decoder, and what is around it."""
    layer = {
        name.replace(OURS, f"{ours}.transformer_layer"): tuple(
            dataclasses.replace(pattern, name=pattern.name.replace(HUB, hub)) for pattern in patterns
        )
        for name, patterns in tensors.items()
        if name.startswith(OURS)
    }
    around = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
    return layer | one_to_one({f"{ours}.{one}.weight": f"{hub}.{other}.weight" for one, other in around.items()})


@dataclass(frozen=True)
class PredictionLayers(rules.Rule):
    """Layers of multi-token prediction."""

    reads = (PREDICTION_LAYERS,)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns their number, if there are any."""
        count = config.get(PREDICTION_LAYERS)
        return {"mtp_num_layers": count} if count else {}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns their number under both names of the key."""
        return dict.fromkeys((PREDICTION_LAYERS, "num_nextn_predict_layers"), values["mtp_num_layers"] or 0)


@dataclass(frozen=True)
class LatentHeads(rules.Rule):
    """Heads, whose keys and values come from a latent."""

    reads = ("num_attention_heads", "num_key_value_heads", "q_lora_rank")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns heads and the rank of queries. Raises UserError if heads share keys."""
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        if groups not in (None, heads):
            raise UserError(f"num_key_value_heads is {groups}; only {heads} (num_attention_heads) is supported")
        rank = config["q_lora_rank"]
        fields = {"multi_latent_attention": True, "qk_layernorm": True, "num_attention_heads": heads}
        return fields if rank is None else fields | {"q_lora_rank": rank}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns all three keys."""
        heads = values["num_attention_heads"]
        return {"num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": values["q_lora_rank"]}


@dataclass(frozen=True)
class LatentNorms(rules.Rule):
    """Epsilon of the norms. That of the latents' norms is always 1e-6 in transformers."""

    reads = decoder.EPSILON.reads

    def fields(self, config: Json) -> dict[str, object]:
        """Returns both numbers."""
        epsilon = decoder.EPSILON.fields(config)
        return epsilon if epsilon[decoder.EPSILON.field] == 1e-6 else epsilon | {"latent_layernorm_epsilon": 1e-6}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the epsilon of the other norms."""
        return decoder.EPSILON.keys(values)


_YARN = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}


@dataclass(frozen=True)
class LatentPositions(rules.Rule):
    """Rotary positions of latent attention, with YaRN or without scaling."""

    reads = ("rope_theta", "rope_scaling", "rope_parameters")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns base and YaRN's numbers. Raises UserError for what YaRN of latent attention does not have."""
        key = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
        rope = config[key] or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        base = whole_base(rope.get("rope_theta", config["rope_theta"]))
        fields = {"position_embedding_type": "rope", "rotary_base": base, "rope_type": "rope"}
        known = {"rope_theta", "rope_type", "type", *(_YARN if kind == "yarn" else ())}
        unknown = [name for name, value in rope.items() if name not in known and value is not None]
        if kind not in ("default", "yarn"):
            raise UserError(f"{key} has rope_type {kind!r}; default, yarn are supported")
        if unknown:
            raise UserError(f"{key} with rope_type {kind!r} has {', '.join(unknown)}, which is unsupported")
        return fields if kind == "default" else fields | self._yarn(key, rope, config)

    def _yarn(self, key: str, rope: Json, config: Json) -> dict[str, object]:
        numbers = {name: rope.get(name) for name in _YARN}
        wrong = [name for name, value in numbers.items() if not isinstance(value, int | float | None)]
        if wrong or numbers["factor"] is None:
            name = wrong[0] if wrong else "factor"
            raise UserError(f"{key} has {name} {rope.get(name)!r}, but it must be a number")
        if numbers["mscale_all_dim"] and not numbers["mscale"]:
            raise UserError(f"{key} has mscale_all_dim without mscale (--mscale), which is unsupported")
        if not numbers["mscale_all_dim"]:  # transformers does not look at mscale then
            numbers |= {"mscale": 1.0, "mscale_all_dim": 0.0}
        defaults = {"original_max_position_embeddings": config["max_position_embeddings"], "beta_fast": 32.0}
        given = defaults | {"beta_slow": 1.0} | {name: value for name, value in numbers.items() if value is not None}
        fields = {_YARN[name]: float(value) for name, value in given.items()}
        fields["original_max_position_embeddings"] = int(given["original_max_position_embeddings"])
        return {"rope_type": "yarn", **fields}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns `rope_theta` and `rope_scaling`."""
        base = {"rope_theta": float(values["rotary_base"])}
        if values["rope_type"] != "yarn":
            return base | {"rope_scaling": None}
        numbers = {key: float(values[field]) for key, field in _YARN.items()}
        length = {"original_max_position_embeddings": values["original_max_position_embeddings"]}
        return base | {"rope_scaling": {"rope_type": "yarn", **numbers, **length}}


@dataclass(frozen=True)
class ExpertsAfterDense(rules.Rule):
    """The first layers are dense; the others have experts, and shared experts that are as wide as a whole number of
    them."""

    reads = ("first_k_dense_replace", "moe_intermediate_size", "n_shared_experts")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns layers and widths. Raises UserError without shared experts, which transformers always builds."""
        dense, width, shared = (config[key] for key in self.reads)
        if not shared or shared < 1:
            raise UserError(
                f"n_shared_experts is {shared}; it must be at least 1 (--moe-shared-expert-intermediate-size)"
            )
        pattern = [int(layer >= dense) for layer in range(config["num_hidden_layers"])]
        return {
            "moe_layer_freq": rules.layers_of(pattern),
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": shared * width,
        }

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns all three keys. Layers in another order are left out."""
        config = run_of(values)
        dense = [not has_experts(config, layer + 1) for layer in range(values["num_layers"])]
        width = values["moe_ffn_hidden_size"] or values["ffn_hidden_size"]
        return {
            "first_k_dense_replace": dense.index(False) if False in dense else len(dense),
            "moe_intermediate_size": width,
            "n_shared_experts": (values["moe_shared_expert_intermediate_size"] or 0) // width,
        }


@dataclass(frozen=True)
class ExpertGroups(rules.Rule):
    """Choice of experts within the best groups, where the score of a group is the sum of its best scores."""

    score_topk: int
    """How many of a group's scores count."""
    by_method: bool = False
    """Whether `topk_method` says that there are groups."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys."""
        return ("n_group", "topk_group", "topk_method") if self.by_method else ("n_group", "topk_group")

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the groups; nothing if there are none, or only one."""
        groups, chosen = config["n_group"], config["topk_group"]
        method = config["topk_method"] if self.by_method else "groups"
        if method not in ("greedy", "group_limited_greedy", "groups"):
            raise UserError(f"topk_method is {method!r}; greedy and group_limited_greedy are supported")
        if method == "greedy" or groups == 1:
            return {}
        if groups is None or chosen is None:
            raise UserError(f"n_group is {groups} and topk_group is {chosen}; both must be numbers")
        return {
            "moe_router_num_groups": groups,
            "moe_router_group_topk": chosen,
            "moe_router_group_score_topk": self.score_topk,
        }

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns the groups; one group, or the method without groups, if there are none."""
        groups, chosen = values["moe_router_num_groups"], values["moe_router_group_topk"]
        method = {"topk_method": "greedy" if groups is None else "group_limited_greedy"} if self.by_method else {}
        one = None if self.by_method else 1
        return {"n_group": groups or one, "topk_group": chosen or one, **method}


@dataclass(frozen=True)
class NormedProbs(rules.Rule):
    """Whether the scores of the chosen experts are divided by their sum."""

    reads = ("norm_topk_prob",)

    def fields(self, config: Json) -> dict[str, object]:
        """Returns the key's value."""
        return {"moe_router_norm_topk_prob": bool(config["norm_topk_prob"])}

    def keys(self, values: rules.Values) -> dict[str, Json]:
        """Returns what the run does: without the flag, several sigmoid scores are divided."""
        given = values["moe_router_norm_topk_prob"]
        return {"norm_topk_prob": values["moe_router_topk"] > 1 if given is None else given}


RULES: tuple[rules.Rule, ...] = (
    *decoder.SIZES,
    *decoder.SWIGLU,
    LatentHeads(),
    LatentNorms(),
    LatentPositions(),
    ExpertsAfterDense(),
    *rules.copied("kv_lora_rank", "v_head_dim", qk_nope_head_dim="qk_head_dim", qk_rope_head_dim="qk_pos_emb_head_dim"),
    *rules.copied(n_routed_experts="num_moe_experts", num_experts_per_tok="moe_router_topk"),
    rules.Copied("routed_scaling_factor", "moe_router_topk_scaling_factor", unset=1.0),
    rules.Fixed("attention_bias", False),
    rules.Fixed("moe_layer_freq", 1, write=False),
    rules.Unused(("head_dim", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux")),
)
"""Rules of all DeepSeek families."""

V3_RULES: tuple[rules.Rule, ...] = (
    ExpertGroups(score_topk=2),
    NormedProbs(),
    rules.Implied({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
    rules.Fixed("scoring_func", "sigmoid", write=False),
    rules.Fixed("topk_method", "noaux_tc", write=False),
    PredictionLayers(),
)
"""Further rules of DeepSeek-V3 and V3.2."""

V3_CONSTANTS = (r"model\.layers\.61\..*",)
"""The layer of multi-token prediction, if config.json has none."""

DEEPSEEK_FAMILIES = (
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        _TENSORS,
        (
            *RULES,
            ExpertGroups(score_topk=1, by_method=True),
            rules.Implied({"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}),
            rules.Fixed("norm_topk_prob", False),
            rules.Fixed("scoring_func", "softmax", write=False),
            rules.Fixed("mlp_bias", False),
        ),
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        partial(with_prediction_layers, V3_TENSORS),
        (*RULES, *V3_RULES, rules.Fixed("rope_interleave", True)),
        constants=V3_CONSTANTS,
        other_model_types=("kimi_k2",),
    ),
)
