"""Flags that a shrunk run sets to other values than the user: sizes, and what has to fit them."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.core.pipeline_parallel.stages import pipeline_of
from megatron.core.transformer.config.heterogeneous import described_layers
from megatron.core.transformer.layer_patterns import PREDICTION_BORDER, STAGE_BORDER, has_mixer, hybrid_letters
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.diagnosis.layout_check.shrink_layout import LayoutSizes, comm_types
from megatron.training.config.flag_table import flag_table, spelling_of
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import CHOSEN

_SHORT = {"attention_chunk_size": 5, "rope_scaling_original_length": 8, "nope_temperature_floor": 3}
"""Flags that count tokens, and how many there are in a small run at most."""
MOST_DEPTHS = 2
"""Largest number of multi-token prediction layers of a small model."""
_MOST_LAYERS = 16
"""A layout that is written stage by stage is run as it is up to so many layers."""


class ShrunkFlags:
    """The flags whose values differ from the user's."""

    def __init__(self, config: PretrainConfig, sizes: LayoutSizes, steps: int, notes: list[str]) -> None:
        self.config, self.sizes, self.steps, self.notes = config, sizes, steps, notes
        self.left_out: set[str] = {"world_size", "data_parallel_size", "num_query_groups", "group_query_attention"}
        self.left_out |= {"num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"}
        self.left_out |= {"moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk"}
        self.left_out |= {"microbatch_group_size_per_vp_stage", "ddp_bucket_size", "ddp_num_buckets", "spec"}
        self.num_layers, self._stage_words = self._stages()

    # Stages ----------------------------------------------------------------------------------------------------------

    def _stages(self) -> tuple[int, list[str]]:
        """Returns the number of layers, and the flags that cut them into stages."""
        transformer, ranks = self.config.transformer, self.sizes.pipeline
        chunks = pipeline_of(transformer).chunks
        layout = transformer.pipeline_model_parallel_layout
        if layout is not None and layout != "auto":
            if ranks == transformer.pipeline_model_parallel_size and transformer.num_layers <= _MOST_LAYERS:
                return transformer.num_layers, []
            self._leave_out("pipeline_model_parallel_layout")
        if ranks == 1:
            self._leave_out(*fields_of_groups(("pipeline stages",)), "pipeline_schedule")
            return max(2, len(self._kinds())), []
        words = []
        if transformer.pipeline_schedule == "zb-v":
            chunks = 2
        elif chunks > 1:
            chunks = 2
            words = ["--num-virtual-stages-per-pipeline-rank", "2"]
        uneven = [
            (name, min(2, given))
            for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
            if (given := getattr(transformer, name)) is not None
        ]
        for name, count in uneven:
            words += [spelling_of(name), str(count * chunks if chunks > 1 else count)]
        stages = ranks * chunks
        each = max(1 if stages > 4 else 2, -(-len(self._kinds()) // stages))
        layers = each * (ranks - len(uneven)) * chunks + sum(count * chunks for _, count in uneven)
        layers -= transformer.account_for_embedding_in_pipeline_split + transformer.account_for_loss_in_pipeline_split
        return layers, words

    def _kinds(self) -> list[str]:
        """Returns the letters of a hybrid model's kinds of layers, or descriptions of a heterogeneous model's as JSON,
        in the order of the layers; none for others."""
        return list(dict.fromkeys(hybrid_letters(self.config.transformer) or self._described_kinds()))

    def _described_kinds(self) -> list[str]:
        """Returns for each described layer which parts it lacks or has as linear layers, without their sizes."""
        layers = described_layers(self.config.transformer) or ()
        kinds = [
            {
                part: {"no_op": kind is None, "replace_with_linear": kind == "linear"}
                for part, kind in (("attention", layer.attention), ("ffn", layer.mlp))
            }
            for layer in layers
        ]
        return [json.dumps(kind) for kind in kinds]

    def _leave_out(self, *fields: str) -> None:
        given = [name for name in fields if self.config.provenance.get(name) in CHOSEN]
        self.left_out |= set(fields)
        if given:
            self.notes.append(f"left out, for it does not fit the smaller layout: {', '.join(map(spelling_of, given))}")

    # Words -----------------------------------------------------------------------------------------------------------

    def model_words(self) -> list[str]:
        """Returns the flags for the sizes of model, data and batch."""
        transformer, sizes = self.config.transformer, self.sizes
        heads = 2 * sizes.tensor * sizes.context
        unit = 2 * sizes.context * sizes.tensor
        length = unit * max(1, math.ceil(16 / unit))
        rows = min(2, self.config.training.micro_batch_size or 1)
        batches = 2 * sizes.pipeline
        words = {
            "num-layers": self.num_layers,
            "hidden-size": 32,
            "ffn-hidden-size": 8 * sizes.tensor,
            "num-attention-heads": heads,
            "kv-channels": 8,
            "seq-length": length,
            "max-position-embeddings": length,
            "micro-batch-size": rows,
            "global-batch-size": rows * batches * sizes.data,
            "train-iters": self.steps,
            "lr": 1e-3,
            "lr-decay-style": "constant",
            "eval-iters": 0,
            "tokenizer-type": "NullTokenizer",
            "vocab-size": 100,
            "num-workers": 0,
            "log-interval": 1000,
        }
        listed = _spelled_out(words)
        listed += ["--mock-data", "--fp64", *self._group_words(heads), *self._pattern_words()]
        listed += [*self._expert_words(), *self._latent_words(), *self._per_channel_words()]
        listed += [*self._hybrid_words(), *self._delta_words(), *self._sparse_words()]
        if transformer.mtp_num_layers:
            listed += ["--mtp-num-layers", str(min(MOST_DEPTHS, transformer.mtp_num_layers))]
        if transformer.window_size is not None:
            listed += ["--window-size", ",".join(str(min(reach, 5)) for reach in transformer.window_size)]
        return [*listed, *self._length_words()]

    def _length_words(self) -> list[str]:
        """Returns flags for numbers of tokens that rows must exceed for a feature to take effect."""
        transformer, words = self.config.transformer, []
        for name, short in _SHORT.items():
            given = getattr(transformer, name)
            if given is not None and self.config.provenance.get(name) in CHOSEN:
                words += [spelling_of(name), str(min(given, short))]
        return words

    def _group_words(self, heads: int) -> list[str]:
        transformer, tensor = self.config.transformer, self.sizes.tensor
        groups, all_heads = transformer.num_query_groups or 0, transformer.num_attention_heads
        if groups in (0, all_heads):
            return []
        if groups < transformer.tensor_model_parallel_size:  # each held by several ranks
            small = max(1, tensor // 2)
        else:
            small = 1 if groups == 1 else heads // 2
        return ["--group-query-attention", "--num-query-groups", str(small)]

    def _expert_words(self) -> list[str]:
        """Returns flags for a few experts and groups, chosen by the same rules."""
        transformer, sizes = self.config.transformer, self.sizes
        if transformer.num_moe_experts is None:
            return []
        groups, width = transformer.moe_router_num_groups, 8 * sizes.expert_tensor
        per_group = 1
        if groups and transformer.moe_router_group_topk:
            per_group = min(2, max(1, transformer.moe_router_topk // transformer.moe_router_group_topk))
        topk = (2 * per_group) if groups else min(transformer.moe_router_topk, 3)
        words: dict[str, Any] = {
            "num-experts": math.lcm(8, sizes.expert),
            "moe-ffn-hidden-size": width,
            "moe-router-topk": topk,
        }
        if groups:
            words |= {"moe-router-num-groups": 4, "moe-router-group-topk": 2}
            if transformer.moe_router_group_score_topk:
                words["moe-router-group-score-topk"] = min(per_group, transformer.moe_router_group_score_topk)
        if transformer.moe_shared_expert_intermediate_size:
            words["moe-shared-expert-intermediate-size"] = 8 * sizes.tensor
        if transformer.moe_latent_size:
            words["moe-latent-size"] = 16
        pattern = transformer.moe_layer_freq
        if isinstance(pattern, list):  # a few of its entries, from the first to the last
            taken = [str(pattern[layer * len(pattern) // self.num_layers]) for layer in range(self.num_layers)]
            words["moe-layer-freq"] = f"[{','.join(taken)}]"
        else:
            words["moe-layer-freq"] = min(pattern, self.num_layers)
        return _spelled_out(words)

    def _hybrid_words(self) -> list[str]:
        """Returns flags for a hybrid or heterogeneous model with each kind of layer, and small Mamba-2 layers."""
        kinds = self._kinds()
        if not kinds:
            return []
        if hybrid_letters(self.config.transformer) is None:
            self.left_out.add("heterogeneous_layers_config_path")
            cycled = ",".join(kinds[layer % len(kinds)] for layer in range(self.num_layers))
            return ["--heterogeneous-layers-config-encoded-json", f'{{"block_configs": [{cycled}]}}']
        self.left_out |= {"hybrid_attention_ratio", "hybrid_mlp_ratio"}
        pattern, border, depths = str(self.config.transformer.hybrid_layer_pattern).partition(PREDICTION_BORDER)
        if len(pattern.replace(STAGE_BORDER, "")) != self.num_layers or self.sizes.pipeline == 1:
            pattern = "".join(kinds[layer % len(kinds)] for layer in range(self.num_layers))
        pattern += border + PREDICTION_BORDER.join(depths.split(PREDICTION_BORDER)[:MOST_DEPTHS])
        groups = self.sizes.tensor * self.sizes.context
        words = {"mamba-num-groups": groups, "mamba-num-heads": 2 * groups, "mamba-head-dim": 8, "mamba-state-dim": 4}
        return _spelled_out({"hybrid-layer-pattern": pattern, **words})

    def _delta_words(self) -> list[str]:
        """Returns flags for small gated delta nets, in the first of the layers or as the pattern says."""
        transformer = self.config.transformer
        if not has_mixer(transformer, "gated_delta_net"):
            return []
        heads = 2 * self.sizes.tensor * self.sizes.context
        words: dict[str, Any] = {"linear-num-key-heads": heads, "linear-num-value-heads": 2 * heads}
        words |= {"linear-key-head-dim": 8, "linear-value-head-dim": 8}
        pattern = transformer.linear_attention_freq
        if isinstance(pattern, int):
            words["linear-attention-freq"] = min(pattern, self.num_layers)
        elif pattern is not None:
            cycled = [str(pattern[layer % len(pattern)]) for layer in range(self.num_layers)]
            words["linear-attention-freq"] = f"[{','.join(cycled)}]"
        return _spelled_out(words)

    def _sparse_words(self) -> list[str]:
        """Returns flags for a small indexer that selects fewer keys than a row has."""
        if not has_mixer(self.config.transformer, "dsa"):
            return []
        return _spelled_out({"dsa-indexer-n-heads": 2, "dsa-indexer-head-dim": 6, "dsa-indexer-topk": 4})

    def _latent_words(self) -> list[str]:
        transformer = self.config.transformer
        if not isinstance(transformer, MLATransformerConfig):
            return []
        words = {"kv-lora-rank": 12, "qk-head-dim": 6, "qk-pos-emb-head-dim": 4, "v-head-dim": 8}
        if transformer.q_lora_rank is not None:
            words["q-lora-rank"] = 10
        return _spelled_out(words)

    def _per_channel_words(self) -> list[str]:
        """Returns flags with a number for each pair of rotated channels, and their share of 8 if it would be odd."""
        words, share = [], self.config.model.rotary_percent
        if int(8 * share) % 2:
            words += ["--rotary-percent", str((int(8 * share) + 1) / 8)]
        for name in ("rope_scaling_short_factor", "rope_scaling_long_factor"):
            factors = getattr(self.config.transformer, name)
            if factors is not None:
                self.left_out.add(name)
                pairs = int(8 * self.config.model.rotary_percent) // 2
                taken = [str(factors[pair * len(factors) // pairs]) for pair in range(pairs)]
                words += [spelling_of(name), *taken]
        return words

    def _pattern_words(self) -> list[str]:
        """Returns patterns over layers, cut or repeated to the number of layers."""
        words = []
        for name in ("window_attn_skip_freq", "attention_chunk_skip_freq", "no_rope_freq"):
            pattern = getattr(self.config.transformer, name)
            if pattern is None:
                continue
            if isinstance(pattern, int):
                on = int(name == "no_rope_freq")  # every N-th layer is the exception
                pattern = [1 - on] * (min(pattern, self.num_layers) - 1) + [on]
            cycled = [str(pattern[layer % len(pattern)]) for layer in range(self.num_layers)]
            words += [spelling_of(name), f"[{','.join(cycled)}]"]
        return words

    def layout_words(self) -> list[str]:
        """Returns the flags for the sizes of the layout, and those that depend on them."""
        transformer, sizes = self.config.transformer, self.sizes
        words = ["--tensor-model-parallel-size", str(sizes.tensor), "--context-parallel-size", str(sizes.context)]
        words += ["--pipeline-model-parallel-size", str(sizes.pipeline), *self._stage_words]
        if sizes.tensor == 1:
            self._leave_out("sequence_parallel", "tp_comm_overlap")
        if transformer.num_moe_experts is not None:
            words += ["--expert-model-parallel-size", str(sizes.expert)]
            words += ["--expert-tensor-parallel-size", str(sizes.expert_tensor)]
        words += self._context_words()
        if transformer.recompute_num_layers is not None:
            words += ["--recompute-num-layers", str(min(2, transformer.recompute_num_layers))]
        if self.config.ddp.num_distributed_optimizer_instances > 1:
            if sizes.data % 2 or sizes.expert_data % 2:
                self._leave_out("num_distributed_optimizer_instances")
            else:
                words += ["--num-distributed-optimizer-instances", "2"]
        return words

    def _context_words(self) -> list[str]:
        kinds, ranks = comm_types(self.config.transformer), self.sizes.context
        if ranks == 1:
            self._leave_out("cp_comm_type", "hierarchical_context_parallel_sizes")
            return []
        words = []
        if "a2a+p2p" in kinds:
            words += ["--hierarchical-context-parallel-sizes", "2", str(ranks // 2)]
        if len(kinds) > 1:
            words += ["--cp-comm-type", *(kinds[layer % len(kinds)] for layer in range(self.num_layers))]
        return words


def _spelled_out(values: Mapping[str, object]) -> list[str]:
    """Words of flags, by name, and their values."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def fields_of_groups(groups: Iterable[str]) -> list[str]:
    """Returns the fields whose flags are in these groups of --help."""
    return [name for name, flag in flag_table().items() if flag.group in groups]
