"""Layouts of the parity tests: one value for each dimension, and the settings that it needs."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from parity.models import LENGTH, Model
from parity.text import GLOBAL_BATCH

from megatron.core.distributed import DistributedDataParallelConfig


@dataclass(frozen=True)
class Choice:
    """One value of a dimension: its number of ranks and its settings."""

    name: str
    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Fields of DistributedDataParallelConfig."""
    chunks: int = 1
    """Model chunks on each pipeline rank."""
    levels: tuple[int, ...] | None = None
    """Sizes of hierarchical context parallelism."""

    def __hash__(self) -> int:
        return hash(self.name)


def _tensor(ranks: int, sequence: bool = False, kind: str = "", **settings: Any) -> Choice:
    sizes = {"tensor_model_parallel_size": ranks, "sequence_parallel": sequence}
    return Choice(f"{'sp' if sequence else 'tp'}{ranks}{kind}", ranks, {**sizes, **settings})


def _stages(name: str, ranks: int, chunks: int = 1, **settings: Any) -> Choice:
    virtual = {"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
    return Choice(name, ranks, {"pipeline_model_parallel_size": ranks, **virtual, **settings}, chunks=chunks)


def _context(name: str, ranks: int, kind: Any, levels: tuple[int, ...] | None = None) -> Choice:
    settings = {"context_parallel_size": ranks, "cp_comm_type": kind}
    if levels:
        settings["hierarchical_context_parallel_sizes"] = list(levels)
    return Choice(name, ranks, settings, levels=levels)


def _dynamic(ranks: int) -> Choice:
    """Context parallelism in which each document is on as many data and context parallel ranks as it needs."""
    return Choice(f"cp{ranks}-dynamic", ranks, {"context_parallel_size": ranks, "hybrid_context_parallel": True})


def _data(name: str, ranks: int, **ddp: Any) -> Choice:
    return Choice(name, ranks, ddp=ddp)


def _shards(name: str, ranks: int, strategy: str, **ddp: Any) -> Choice:
    settings = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": True}
    return _data(name, ranks, **settings, use_distributed_optimizer=True, **ddp)


def _experts(ranks: int, tensor: int | None = None, name: str = "", **settings: Any) -> Choice:
    """Expert parallelism over `ranks`, each expert split over `tensor` ranks (None: the tensor parallel size)."""
    name = name or f"ep{ranks}" + ("" if tensor is None else f"-etp{tensor}")
    sizes = {"expert_model_parallel_size": ranks, "expert_tensor_parallel_size": tensor}
    return Choice(name, settings={**sizes, **settings})


_STATE = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
_FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
_PARTS = {"recompute_granularity": "selective"}
_OFFLOADED = {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1}
_SPREAD = {**_FULL, "recompute_method": "uniform", "distribute_saved_activations": True}

DIMENSIONS: dict[str, list[Choice]] = {
    "tensor": [Choice("tp1"), _tensor(2), _tensor(2, sequence=True)],
    "pipeline": [
        Choice("pp1"),
        _stages("pp2", 2),
        _stages("pp2-uneven", 2, num_layers_in_first_pipeline_stage=1),
        _stages("pp2-interleaved", 2, chunks=2),
        _stages("pp2-zb-h1", 2, pipeline_schedule="zb-h1"),
        _stages("pp2-zb-v", 2, chunks=2, pipeline_schedule="zb-v"),
    ],
    "context": [
        Choice("cp1"),
        _context("cp2-p2p", 2, "p2p"),
        _context("cp2-a2a", 2, "a2a"),
    ],
    "data": [
        Choice("dp1"),
        _data("dp2", 2, overlap_grad_reduce=True),
        _data("dp2-optim", 2, **_STATE),
        _shards("dp2-optim_grads", 2, "optim_grads"),
        _shards("dp2-optim_grads_params", 2, "optim_grads_params"),
        _data("dp4-hybrid", 4, use_distributed_optimizer=True, num_distributed_optimizer_instances=2),
    ],
    "recompute": [
        Choice("keep"),
        Choice("recompute-full", settings={**_FULL, "recompute_method": "uniform"}),
        Choice("recompute-core", settings={**_PARTS, "recompute_modules": ["core_attn"]}),
    ],
    "experts": [
        Choice("ep1"),
        _experts(2),
        _experts(4, 1),
        _experts(2, 1),
        _experts(1, 2, "etp2"),
    ],
}
"""Values that are combined in pairs. The first value of each dimension is the absence of this kind of parallelism."""

FURTHER: dict[str, list[Choice]] = {
    "tensor": [
        _tensor(4),
        _tensor(8, sequence=True),
        _tensor(4, sequence=True),
        _tensor(2, sequence=True, kind="-pieces", tp_comm_overlap=True),
        _tensor(4, sequence=True, kind="-pieces", tp_comm_overlap=True, tp_comm_overlap_rs_dgrad=True),
        Choice("tp2-spread", 2, {"tensor_model_parallel_size": 2, **_SPREAD}),
    ],
    "pipeline": [
        _stages("pp4", 4),
        _stages("pp4-zb-h1", 4, pipeline_schedule="zb-h1"),
        _stages("pp4-layout", 4, chunks=2, pipeline_model_parallel_layout="E|t|t||t||t|L"),
        _stages("pp2-layout", 2, chunks=2, pipeline_model_parallel_layout="Et|tt||tL"),
        _stages("pp2-auto", 2, pipeline_model_parallel_layout="auto"),
        _stages("pp2-three-chunks", 2, chunks=3, pipeline_model_parallel_layout="E|t|t|t|t|L"),
        _stages("pp2-groups-of-4", 2, chunks=2, microbatch_group_size_per_vp_stage=4),
        _stages(
            "pp2-counted",
            2,
            chunks=3,
            account_for_embedding_in_pipeline_split=True,
            account_for_loss_in_pipeline_split=True,
        ),
        _stages("pp2-overlap", 2, chunks=2, overlap_p2p_comm=True, batch_p2p_comm=False),
        _stages("pp4-zb-v", 4, chunks=2, pipeline_schedule="zb-v", pipeline_model_parallel_layout="E|t|t||t||t|L"),
        _stages("pp2-variable", 2, variable_seq_lengths=True),
        _stages("pp8-layout", 8, pipeline_model_parallel_layout="E|t|t||t||t|L"),
        _stages("pp2-last-1", 2, num_layers_in_last_pipeline_stage=1),
        _stages("pp4-apart", 4, pipeline_model_parallel_layout="Et|tt|tm|L"),
        _stages("pp2-apart", 2, chunks=2, pipeline_model_parallel_layout="Et|tt|t|mL"),
        _stages("pp4-split", 4, pipeline_model_parallel_split_rank=2),
        _stages("pp3-two-stacks", 3, pipeline_model_parallel_layout="Etttt|Et|tttL"),
        _stages("pp2-apart-and-behind", 2, chunks=3, pipeline_model_parallel_layout="E|tt|t|t|mm|L"),
    ],
    "context": [
        _context("cp4-p2p", 4, "p2p"),
        _context("cp4-a2a", 4, "a2a"),
        _context("cp4-levels", 4, "a2a+p2p", (2, 2)),
        _context("cp2-by-layer", 2, ["p2p", "a2a", "a2a", "p2p"]),
        _context("cp8-levels", 8, "a2a+p2p", (2, 4)),
        _dynamic(1),
        _dynamic(2),
        _dynamic(4),
    ],
    "data": [
        _data("dp8", 8),
        _data("dp4-average", 4, average_in_collective=True, overlap_grad_reduce=True, bucket_size=4000),
        _data("dp4-optim", 4, use_distributed_optimizer=True),
        _shards("dp4-optim_grads", 4, "optim_grads"),
        _shards("dp8-optim_grads_params", 8, "optim_grads_params"),
        _shards("dp4-fsdp-optim", 4, "optim"),
        _data("dp8-hybrid", 8, **_STATE, num_distributed_optimizer_instances=2),
    ],
    "recompute": [
        Choice("recompute-block", settings={**_FULL, "recompute_method": "block"}),
        Choice("recompute-norms", settings={**_PARTS, "recompute_modules": ["layernorm"]}),
        Choice("recompute-all-parts", settings={**_PARTS, "recompute_modules": ["core_attn", "layernorm", "mlp"]}),
        Choice("recompute-moe", settings={**_PARTS, "recompute_modules": ["moe", "layernorm"]}),
        Choice("recompute-experts", settings={**_PARTS, "recompute_modules": ["moe_act", "core_attn"]}),
        Choice("recompute-shared", settings={**_PARTS, "recompute_modules": ["shared_experts", "moe_act"]}),
        Choice(
            "offload",
            settings={
                **_PARTS,
                "recompute_modules": ["layernorm"],
                **_OFFLOADED,
                "offload_modules": ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"],
            },
        ),
        Choice(
            "offload-experts",
            settings={
                **_PARTS,
                "recompute_modules": ["moe_act"],
                **_OFFLOADED,
                "offload_modules": ["mlp_norm", "core_attn", "expert_fc1", "moe_act"],
            },
        ),
        Choice("recompute-latents", settings={**_PARTS, "recompute_modules": ["mla_up_proj", "layernorm"]}),
    ],
    "experts": [
        _experts(8, 1),
        _experts(2, 2),
        _experts(2, 1, "ep2-flex", moe_token_dispatcher_type="flex"),
        _experts(2, 1, "ep2-late", moe_token_dispatcher_type="allgather", delay_wgrad_compute=True),
    ],
}
"""Larger and special values, tested alone and with a few others."""


@dataclass(frozen=True)
class Layout:
    """A value for each dimension, and the order of ranks."""

    tensor: Choice = DIMENSIONS["tensor"][0]
    pipeline: Choice = DIMENSIONS["pipeline"][0]
    context: Choice = DIMENSIONS["context"][0]
    data: Choice = DIMENSIONS["data"][0]
    recompute: Choice = DIMENSIONS["recompute"][0]
    experts: Choice = DIMENSIONS["experts"][0]
    order: str = "tp-cp-ep-dp-pp"

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(getattr(self, dimension) for dimension in DIMENSIONS)

    @cached_property
    def ranks(self) -> int:
        ranks = 1
        for choice in self.choices:
            ranks *= choice.ranks
        return ranks

    @property
    def name(self) -> str:
        split = [c.name for c in self.choices if c not in _NONE]
        return "+".join(split + (["pp-before-dp"] if self.order == PIPELINE_BEFORE_DATA else [])) or "one"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Fields of TransformerConfig."""
        room = {"max_seqlen_per_dp_cp_rank": self.room} if self.is_dynamic else {}
        return room | {name: value for choice in self.choices for name, value in choice.settings.items()}

    @property
    def is_dynamic(self) -> bool:
        """Whether documents leave their rows (dynamic context parallelism)."""
        return bool(self.context.settings.get("hybrid_context_parallel"))

    @property
    def room(self) -> int:
        """Tokens of a rank with dynamic context parallelism: so few that a sample needs all ranks."""
        return LENGTH // (self.context.ranks * self.data.ranks)

    def ddp_config(self, **settings: Any) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(**{**self.data.ddp, **settings})

    def misfit(self, model: Model) -> str | None:
        """Returns why the model cannot have this layout, or None."""
        tensor, context, rows = self.tensor.ranks, self.context.ranks, model.rows
        if max(tensor, model.groups) % min(tensor, model.groups):
            return "neither of key heads and tensor parallel ranks divides the other"
        if self.tensor.settings.get("sequence_parallel") and LENGTH * (rows if model.packed else 1) // context % tensor:
            return "tensor parallel ranks do not divide the tokens"
        if GLOBAL_BATCH % (self.data.ranks * rows):
            return "data parallel ranks do not divide the batch"
        stages = str(self.pipeline.settings.get("pipeline_model_parallel_layout") or "")
        if "m" in stages and stages.count("m") != model.predicting:
            return "the stage layout has another number of multi-token prediction layers"
        if model.settings.get("linear_num_key_heads", tensor * context) % (tensor * context):
            return "the ranks of a row do not divide the heads of gated delta nets"
        if self.is_dynamic and (reason := self._misfit_of_documents(model)):
            return reason
        if model.kind == "t5":
            return self._misfit_of_two_stacks() or self._misfit_of_recompute(model) or self._misfit_of_experts(model)
        if "pipeline_model_parallel_split_rank" in self.pipeline.settings or stages.count("E") > 1:
            return "there is one stack"
        return self._misfit_of_recompute(model) or self._misfit_of_experts(model)

    def _misfit_of_documents(self, model: Model) -> str | None:
        if not model.packed or model.drops or model.losses[0] != "per-token":
            return "only packed documents without dropout can leave their rows, with a loss per token"
        if model.experts or {"hybrid_layer_pattern", "experimental_attention_variant"} & set(model.settings):
            return "layers communicate over the ranks of whole rows"
        if self.pipeline.ranks > 1 or self.data.ddp.get("data_parallel_sharding_strategy", "optim") != "optim":
            return "ranks have different numbers of micro-batches"
        return None

    def _misfit_of_two_stacks(self) -> str | None:
        if self.context.ranks > 1:
            return "an encoder and a decoder do not split sequences"
        named = {"num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"}
        if self.pipeline.chunks > 1 or named & set(self.pipeline.settings):
            return "an encoder and a decoder have one stage on each rank, cut by a layout"
        layout = self.pipeline.settings.get("pipeline_model_parallel_layout")
        if layout not in (None, "auto") and layout.count("E") != 2:
            return "the layout has one stack"
        return None

    def _misfit_of_recompute(self, model: Model) -> str | None:
        modules = set(self.recompute.settings.get("recompute_modules", ()))
        if modules & {"moe", "moe_act"} and not model.experts:
            return "the model has no experts to recompute"
        if "mlp" in modules and model.experts and model.settings.get("moe_layer_freq", 1) == 1:
            return "every layer has experts"
        shared = model.settings.get("moe_shared_expert_intermediate_size")
        if "shared_experts" in modules and (not shared or model.settings.get("moe_shared_expert_overlap")):
            return "the model has no shared experts to recompute"
        if "mla_up_proj" in modules and not model.is_latent:
            return "the model has no latent attention"
        return None

    def _misfit_of_experts(self, model: Model) -> str | None:
        if self.experts.settings and not model.experts:
            return "the model has no experts"
        if not model.experts:
            return None
        sequence, stage = self.tensor.settings.get("sequence_parallel"), self.ranks // self.pipeline.ranks
        if self.tensor.ranks > 1 and not sequence:
            return "experts under tensor parallelism need sequence parallelism"
        tensor = self.experts.settings.get("expert_tensor_parallel_size") or self.tensor.ranks
        ranks = tensor * self.experts.settings.get("expert_model_parallel_size", 1)
        if stage % ranks:
            return "expert parallel ranks do not divide those of a stage"
        if self.order == PIPELINE_BEFORE_DATA and self.tensor.ranks * self.context.ranks % ranks:
            return "pipelines of the two grids differ"
        if stage // ranks % self.data.ddp.get("num_distributed_optimizer_instances", 1):
            return "instances of the optimizer's state do not divide the copies of an expert"
        if model.experts % self.experts.settings.get("expert_model_parallel_size", 1):
            return "expert parallel ranks do not divide the experts"
        return None

    @property
    def schedule(self) -> str | None:
        return self.pipeline.settings.get("pipeline_schedule")


_NONE = {choices[0] for choices in DIMENSIONS.values()}
PIPELINE_BEFORE_DATA = "tp-cp-ep-pp-dp"
"""The order of --use-tp-pp-dp-mapping."""


def choice(name: str) -> Choice:
    """Returns the value with this name."""
    for table in (DIMENSIONS, FURTHER):
        for choices in table.values():
            for candidate in choices:
                if candidate.name == name:
                    return candidate
    raise KeyError(name)


def dimension_of(wanted: Choice) -> str:
    """Returns the dimension of a value."""
    return next(d for table in (DIMENSIONS, FURTHER) for d, choices in table.items() if wanted in choices)


def layout(*names: str, order: str = Layout.order) -> Layout:
    """Returns the layout with these values."""
    return Layout(**{dimension_of(choice(name)): choice(name) for name in names}, order=order)
