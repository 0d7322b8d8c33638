"""A run made small: the same kinds of layers and the same dimensions of the layout, in sizes that any machine runs.

What is kept are the flags that say what a layer computes, and how it is split over ranks. Sizes are the smallest that
the splits allow; numbers are float64, data is made up, and nothing is saved.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.stages import pipeline_of
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.config.command_line import split_words
from megatron.training.config.flag_table import GROUPS, flag_table, flags_by_spelling, is_to_come, spelling_of
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.retired import translate_all
from megatron.training.run_description import command_line_of

_PARTS_OF_LAYERS = ("attention", "positions", "mixture of experts", "multi-latent attention")
_MODEL_GROUPS = ("model", *_PARTS_OF_LAYERS, "initial weights", "optimizer")
_LAYOUT_GROUPS = ("number formats, seed and ranks", "data parallel", "memory", "kernels", "pipeline stages")
_MODEL_TOO = {"seed", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"}
_LAYOUT_TOO = {"cp_comm_type", "use_distributed_optimizer", "overlap_param_gather"}
"""Flags that stand among the others in --help."""
_SIZES = {"seq_length", "micro_batch_size", "global_batch_size"}
_FORMATS = {
    "fp16",
    "bf16",
    "fp64",
    "lr",
    "min_lr",
    "decoupled_lr",
    "decoupled_min_lr",
    "loss_scale",
    "attention_backend",
}
_FORMATS |= {"main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"}
"""Flags of the kept groups that do not go with float64, or with a learning rate of our own."""


_SHORT = {"attention_chunk_size": 5, "rope_scaling_original_length": 8, "nope_temperature_floor": 3}
"""Flags that count tokens, and how many there are in a small run at most."""


@dataclass
class Sizes:
    """Ranks along each dimension of a layout."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    """The ranks of a stage are shared out a second time, for experts."""
    expert_tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    def __str__(self) -> str:
        split = f"tensor {self.tensor} x context {self.context} x pipeline {self.pipeline} x data {self.data}"
        if self.expert * self.expert_tensor == 1:
            return split
        return f"{split}, experts over {self.expert} x {self.expert_tensor} tensor"


@dataclass
class SmallRun:
    """A run made small, under its layout and under none."""

    sizes: Sizes
    words: list[str]
    """Its command line."""
    plain_words: list[str]
    """Of one process."""
    notes: list[str] = field(default_factory=list)
    """What is not as the user wrote it, a line each."""


def words_that_matter(flags: Sequence[str]) -> list[str]:
    """A run's command line without what is made up here anyway: data, tokenizer, checkpoints, logs, schedules."""
    occurrences, strays = split_words(flags)
    occurrences, _ = translate_all(occurrences)
    groups = {*_MODEL_GROUPS, *_LAYOUT_GROUPS}
    table = flags_by_spelling()
    kept = list(strays)
    for occurrence in occurrences:
        flag = table.get(occurrence.spelling)
        # What is unknown, or not built yet, is left for the command line to be told.
        if flag is None or flag.group in groups or flag.field in _MODEL_TOO | _SIZES or is_to_come(flag):
            kept += [occurrence.spelling, *occurrence.words]
    # A dry run needs no length of training.
    return [*kept, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--dry-run"]


def shrink(config: PretrainConfig, processes: int, steps: int) -> SmallRun:
    """The small run of a config, on at most so many processes. Raises UserError if there is nothing to compare."""
    if config.world_size == 1:
        raise UserError(
            "there is one rank, and so nothing to compare; give sizes of a layout, or WORLD_SIZE=N before it"
        )
    sizes, notes = fitting(config, processes)
    shape = _Shape(config, sizes, steps, notes)
    kept = set(_fields(_MODEL_GROUPS)) - _LAYOUT_TOO - _FORMATS | _MODEL_TOO
    layout = set(_fields(_LAYOUT_GROUPS)) - _MODEL_TOO - _FORMATS | _LAYOUT_TOO
    model_words, layout_words = shape.model_words(), shape.layout_words()
    without = _overridden([*model_words, *layout_words]) | shape.left_out
    plain = command_line_of(config, kept - without)
    whole = command_line_of(config, (kept | layout) - without)
    return SmallRun(sizes, [*whole, *model_words, *layout_words], [*plain, *model_words], notes)


def _fields(groups: Iterable[str]) -> list[str]:
    return [name for name, flag in flag_table().items() if flag.group in groups]


def _overridden(words: Sequence[str]) -> set[str]:
    return {name for name, flag in flag_table().items() if set(flag.spellings) & set(words)}


# ---------------------------------------------------------------------------------------------------------------------
# The layout


def fitting(config: PretrainConfig, processes: int) -> tuple[Sizes, list[str]]:
    """Sizes of a layout for at most so many processes: each dimension that there is stays, with two ranks at least (for
    hierarchical context parallelism, four), as far as that is possible; and what to say about it."""
    grid, transformer = config.grid, config.transformer
    asked = Sizes(grid.tensor, grid.context, grid.pipeline, grid.data)
    sizes = Sizes(asked.tensor, asked.context, asked.pipeline, asked.data)
    least = {"tensor": 2, "context": 4 if "a2a+p2p" in comm_types(transformer) else 2, "pipeline": 2, "data": 2}
    notes = []
    while sizes.ranks > processes:
        longer = [name for name in least if getattr(sizes, name) > least[name]]
        if longer:
            name = max(longer, key=lambda name: getattr(sizes, name))
            setattr(sizes, name, max(least[name], getattr(sizes, name) // 2))
            continue
        name = next(name for name in ("data", "context", "pipeline", "tensor") if getattr(sizes, name) > 1)
        notes.append(
            f"{name} parallelism is left out: {sizes.ranks} processes would be needed, {processes} are allowed "
            f"(--processes {sizes.ranks} takes it in)"
        )
        setattr(sizes, name, 1)
    if transformer.num_moe_experts is not None:
        asked.expert, asked.expert_tensor = grid.expert, grid.expert_tensor or grid.tensor
        notes += _share_experts_out(sizes, asked)
    if sizes != asked:
        notes.insert(0, f"layout: {sizes} instead of {asked}")
    return sizes, notes


def _share_experts_out(sizes: Sizes, asked: Sizes) -> list[str]:
    """Two ranks or so in each dimension of the grid of experts, as far as the ranks of a stage suffice."""
    left, notes = sizes.tensor * sizes.context * sizes.data, []
    for name, wanted in (("expert_tensor", asked.expert_tensor), ("expert", asked.expert)):
        like_tensor = name == "expert_tensor" and wanted == asked.tensor
        size = sizes.tensor if like_tensor else min(2, wanted)
        if left % size:
            size = 1
            notes.append(f"{name.replace('_', ' ')} parallelism is left out: too few ranks are left")
        setattr(sizes, name, size)
        left //= size
    return notes


def comm_types(transformer: TransformerConfig) -> list[str]:
    """How context parallel ranks exchange keys and values: a word for all layers, or one for each."""
    given = transformer.cp_comm_type
    return [given or "p2p"] if given is None or isinstance(given, str) else list(given)


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


class _Shape:
    """The flags that are given other values than the user's."""

    def __init__(self, config: PretrainConfig, sizes: Sizes, steps: int, notes: list[str]) -> None:
        self.config, self.sizes, self.steps, self.notes = config, sizes, steps, notes
        self.left_out: set[str] = {"world_size", "data_parallel_size", "num_query_groups", "group_query_attention"}
        self.left_out |= {"num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"}
        self.left_out |= {"moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk"}
        self.left_out |= {"microbatch_group_size_per_vp_stage", "ddp_bucket_size", "ddp_num_buckets", "spec"}
        self.num_layers, self._stage_words = self._stages()

    # Stages ----------------------------------------------------------------------------------------------------------

    def _stages(self) -> tuple[int, list[str]]:
        """Number of layers, and flags that cut them into stages."""
        transformer, ranks = self.config.transformer, self.sizes.pipeline
        chunks = pipeline_of(transformer).chunks
        layout = transformer.pipeline_model_parallel_layout
        if layout is not None and layout != "auto":
            if ranks == transformer.pipeline_model_parallel_size and transformer.num_layers <= _MOST_LAYERS:
                return transformer.num_layers, []
            self._leave_out("pipeline_model_parallel_layout")
        if ranks == 1:
            self._leave_out(*_fields(("pipeline stages",)), "pipeline_schedule")
            return 2, []
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
        each = 1 if stages > 4 else 2
        layers = each * (ranks - len(uneven)) * chunks + sum(count * chunks for _, count in uneven)
        layers -= transformer.account_for_embedding_in_pipeline_split + transformer.account_for_loss_in_pipeline_split
        return layers, words

    def _leave_out(self, *fields: str) -> None:
        given = [name for name in fields if self.config.provenance.get(name) in ("flag", "script")]
        self.left_out |= set(fields)
        if given:
            self.notes.append(f"left out, for it does not fit the smaller layout: {', '.join(map(spelling_of, given))}")

    # Words -----------------------------------------------------------------------------------------------------------

    def model_words(self) -> list[str]:
        """Sizes of the model, data and batch."""
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
        listed = [word for name, value in words.items() for word in (f"--{name}", str(value))]
        listed += ["--mock-data", "--fp64", *self._group_words(heads), *self._pattern_words()]
        listed += [*self._expert_words(), *self._latent_words(), *self._per_channel_words()]
        if transformer.mtp_num_layers:
            listed += ["--mtp-num-layers", str(min(2, transformer.mtp_num_layers))]
        if transformer.window_size is not None:
            listed += ["--window-size", ",".join(str(min(reach, 5)) for reach in transformer.window_size)]
        return [*listed, *self._length_words()]

    def _length_words(self) -> list[str]:
        """Numbers of tokens that rows have to be longer than, for what begins there to be met."""
        transformer, words = self.config.transformer, []
        for name, short in _SHORT.items():
            given = getattr(transformer, name)
            if given is not None and self.config.provenance.get(name) in ("flag", "script"):
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
        """Experts and their groups: few, and the same rules of choosing among them."""
        transformer, sizes = self.config.transformer, self.sizes
        if transformer.num_moe_experts is None:
            return []
        groups, width = transformer.moe_router_num_groups, 8 * sizes.expert_tensor
        per_group = 1
        if groups and transformer.moe_router_group_topk:
            per_group = min(2, max(1, transformer.moe_router_topk // transformer.moe_router_group_topk))
        topk = (2 * per_group) if groups else min(transformer.moe_router_topk, 3)
        words: dict[str, Any] = {
            "num-experts": 8 * max(1, sizes.expert // 8),
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
        return [word for name, value in words.items() for word in (f"--{name}", str(value))]

    def _latent_words(self) -> list[str]:
        transformer = self.config.transformer
        if not isinstance(transformer, MLATransformerConfig):
            return []
        words = {"kv-lora-rank": 12, "qk-head-dim": 6, "qk-pos-emb-head-dim": 4, "v-head-dim": 8}
        if transformer.q_lora_rank is not None:
            words["q-lora-rank"] = 10
        return [word for name, value in words.items() for word in (f"--{name}", str(value))]

    def _per_channel_words(self) -> list[str]:
        """Lists with a number for each pair of channels that is turned."""
        words = []
        for name in ("rope_scaling_short_factor", "rope_scaling_long_factor"):
            factors = getattr(self.config.transformer, name)
            if factors is not None:
                self.left_out.add(name)
                pairs = int(8 * self.config.model.rotary_percent) // 2
                taken = [str(factors[pair * len(factors) // pairs]) for pair in range(pairs)]
                words += [spelling_of(name), *taken]
        return words

    def _pattern_words(self) -> list[str]:
        """Patterns over layers, cut or repeated to the number of layers."""
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
        """Sizes of the layout, and what depends on them."""
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
            if sizes.data % 2:
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


_MOST_LAYERS = 16
"""A layout that is written stage by stage is run as it is up to so many layers."""

assert set(_MODEL_GROUPS) | set(_LAYOUT_GROUPS) <= GROUPS.keys()
