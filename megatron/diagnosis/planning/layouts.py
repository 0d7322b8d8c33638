"""Layouts of a model over the GPUs of a cluster: parallel sizes and ways to save memory that the rules allow."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.groups.rank_grid import nearest_divisors
from megatron.diagnosis.planning.parameter_count import expert_layers
from megatron.diagnosis.planning.specification import Specification

RECOMPUTES = ("none", "mlp", "full")
"""Ways to recompute, from the fastest: nothing, the MLPs (selective), whole layers."""

MAX_BUBBLE = 0.15
"""Largest part of a step that pipeline ranks may wait: above it, more micro-batches or fewer stages are faster."""

_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


@dataclass(frozen=True, order=True)
class Layout:
    """Parallel sizes, and what is done to save memory."""

    tensor: int
    context: int
    pipeline: int
    virtual: int
    """Model chunks of a pipeline rank."""
    expert: int
    data: int
    micro_batch: int
    recompute: str
    """One of RECOMPUTES."""
    zero: int
    """ZeRO stage: 0 shards nothing, 1 the optimizer's state, 2 gradients too, 3 weights too."""

    @property
    def name(self) -> str:
        """The layout in short, such as TP 4, PP 2 x 2, DP 8."""
        parts = [f"TP {self.tensor}"]
        if self.context > 1:
            parts.append(f"CP {self.context}")
        if self.pipeline > 1:
            parts.append(f"PP {self.pipeline}" + (f" x {self.virtual} chunks" if self.virtual > 1 else ""))
        if self.expert > 1:
            parts.append(f"EP {self.expert}")
        parts += [f"DP {self.data}", f"micro-batch {self.micro_batch}"]
        parts += [f"recompute {self.recompute}"] * (self.recompute != "none")
        return ", ".join([*parts, f"ZeRO-{self.zero}"])

    def num_microbatches(self, global_batch_size: int) -> int:
        """Micro-batches of a step on each rank."""
        return global_batch_size // (self.micro_batch * self.data)

    def bubble(self, global_batch_size: int) -> float:
        """Returns the part of a step that a pipeline rank waits: (p-1)/(v m + p-1) for v chunks (arXiv:2104.04473,
        section 2.2)."""
        waits = self.pipeline - 1
        return waits / (self.virtual * self.num_microbatches(global_batch_size) + waits)

    def flags(self) -> dict[str, Any]:
        """Returns the flags of the layout by field, without those that have their defaults."""
        found: dict[str, Any] = {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
            "micro_batch_size": self.micro_batch,
        }
        if self.tensor > 1:
            found["sequence_parallel"] = True
        if self.pipeline > 1:
            found["pipeline_model_parallel_layout"] = "auto"
            if self.virtual > 1:
                found["num_virtual_stages_per_pipeline_rank"] = self.virtual
        if self.expert > 1:
            found["expert_model_parallel_size"] = self.expert
            found["expert_tensor_parallel_size"] = 1
        if self.zero == 1:
            found |= {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
        elif self.zero > 1:
            found |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": _STRATEGIES[self.zero]}
            found |= {"overlap_grad_reduce": True, "overlap_param_gather": True}
        if self.recompute == "full":
            found |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        elif self.recompute != "none":
            found |= {"recompute_granularity": "selective", "recompute_modules": [self.recompute]}
        return found


@dataclass(frozen=True)
class Space:
    """What a layout must fit."""

    flags: Mapping[str, Any]
    """Model flags by field."""
    seq_length: int
    global_batch_size: int
    gpus: int
    domain: int
    """GPUs that NVLink joins, which bounds the tensor parallel size."""
    specification: Specification

    @property
    def heads(self) -> int:
        """Attention heads, which tensor parallel ranks share."""
        return int(self.flags.get("num_attention_heads") or self.flags.get("mamba_num_heads") or 1)

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 without."""
        return int(self.flags.get("num_moe_experts") or 0) if expert_layers(self.flags) else 0


def powers(most: int) -> list[int]:
    """Returns the powers of two up to `most`."""
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def possible_layouts(space: Space, zero_stages: tuple[int, ...]) -> Iterator[Layout]:
    """Yields all layouts that the rules allow, without regard to memory."""
    given = space.specification
    for tensor in _sizes(given.tensor_parallel, _tensor_sizes(space)):
        for pipeline in _sizes(given.pipeline_parallel, _pipeline_sizes(space)):
            for context in _sizes(given.context_parallel, _context_sizes(space, tensor)):
                data, rest = divmod(space.gpus, tensor * pipeline * context)
                if rest or not data or given.data_parallel not in (None, data):
                    continue
                if given.is_dynamic and (pipeline > 1 or (context * data) & (context * data - 1)):
                    continue  # it needs one stage and a power of two of ranks
                for expert in _sizes(given.expert_parallel, _expert_sizes(space, tensor * context * data)):
                    yield from _of_sizes(space, (tensor, context, pipeline, expert, data), zero_stages)


def _of_sizes(space: Space, sizes: tuple[int, int, int, int, int], zero_stages: tuple[int, ...]) -> Iterator[Layout]:
    tensor, context, pipeline, expert, data = sizes
    samples, rest = divmod(space.global_batch_size, data)
    if rest or not samples:
        return
    for micro_batch in (1, 2, 4, 8):
        if samples % micro_batch or (micro_batch * space.seq_length // context > 65536 and micro_batch > 1):
            continue
        for virtual in _virtual_sizes(space, pipeline, samples // micro_batch):
            for recompute in RECOMPUTES:
                if recompute == "mlp" and space.experts and space.flags.get("moe_layer_freq", 1) == 1:
                    continue  # there is no dense MLP
                for zero in zero_stages:
                    if zero > 1 and space.specification.is_dynamic:
                        continue  # it needs whole weights and gradients
                    yield Layout(tensor, context, pipeline, virtual, expert, data, micro_batch, recompute, zero)


def _sizes(given: int | None, allowed: list[int]) -> list[int]:
    return allowed if given is None else [given]


def _tensor_sizes(space: Space) -> list[int]:
    groups = space.flags.get("num_query_groups") or space.heads
    return [
        size
        for size in powers(min(space.domain, space.gpus))
        if space.heads % size == 0 and (groups % size == 0 or size % groups == 0)
    ]


def _pipeline_sizes(space: Space) -> list[int]:
    layers = space.flags["num_layers"]
    if "hybrid_layer_pattern" in space.flags:
        return [size for size in powers(space.gpus) if layers % size == 0 and layers // size >= 2]
    sizes = {size for size in range(1, min(layers, space.gpus) + 1) if space.gpus % size == 0}
    return [size for size in sorted(sizes) if size in powers(size) or size <= 16]


def _context_sizes(space: Space, tensor: int) -> list[int]:
    if "hybrid_layer_pattern" in space.flags:
        return [1]
    return [
        size
        for size in powers(max(1, space.seq_length // 4096))
        if size == 1 or space.seq_length % (2 * size * tensor) == 0
    ]


def _expert_sizes(space: Space, ranks_of_stage: int) -> list[int]:
    """Expert parallel sizes: the experts of a layer over the ranks of its stage, whole experts each."""
    if not space.experts:
        return [1]
    return [size for size in powers(space.experts) if space.experts % size == 0 and ranks_of_stage % size == 0]


def _virtual_sizes(space: Space, pipeline: int, microbatches: int) -> list[int]:
    """Chunks of a rank. The interleaved schedule needs a multiple of the stages as micro-batches."""
    if pipeline == 1 or "hybrid_layer_pattern" in space.flags:
        return [1]
    most = space.flags["num_layers"] // pipeline
    return [1, *(size for size in (2, 3, 4, 6, 8) if size <= most and microbatches % pipeline == 0)]


# ---------------------------------------------------------------------------------------------------------------------
# Contradictions


def contradictions(space: Space) -> Iterator[str]:
    """Yields a sentence for each given parallel size that breaks a rule, with the nearest values that work; if there is
    none, for sizes whose product does not fit the GPUs."""
    yield from list(_wrong_sizes(space)) or _wrong_products(space)


def _wrong_sizes(space: Space) -> Iterator[str]:
    given = space.specification
    if given.is_dynamic:
        yield from _not_dynamic(space)

    def said(field: str, what: str) -> str:
        return f"{what} {getattr(given, field)} ({given.where[field]})"

    if (tensor := given.tensor_parallel) is not None:
        of_heads = [size for size in range(1, min(space.domain, space.gpus) + 1) if space.heads % size == 0]
        if tensor > space.domain:
            yield (
                f"{said('tensor_parallel', 'tensor parallelism')} is beyond the {space.domain} GPUs that NVLink joins, "
                f"and each layer would wait for the network; use {max(size for size in of_heads)}"
            )
        elif space.heads % tensor:
            near = " or ".join(map(str, nearest_divisors(space.heads, tensor)))
            yield f"{said('tensor_parallel', 'tensor parallelism')} does not divide the {space.heads} heads; use {near}"
    if (pipeline := given.pipeline_parallel) is not None and pipeline > space.flags["num_layers"]:
        yield (
            f"{said('pipeline_parallel', 'pipeline parallelism')} is more than the {space.flags['num_layers']} layers; "
            f"use at most {space.flags['num_layers']}"
        )
    if (expert := given.expert_parallel) is not None and expert > 1:
        if not space.experts:
            yield f"{said('expert_parallel', 'expert parallelism')}: the model has no experts; use 1"
        elif space.experts % expert:
            near = " or ".join(map(str, nearest_divisors(space.experts, expert)))
            yield f"{said('expert_parallel', 'expert parallelism')} does not divide {space.experts} experts; use {near}"


def _not_dynamic(space: Space) -> Iterator[str]:
    """Yields a sentence for each value that dynamic context parallelism does not go with."""
    given = space.specification
    name = f"dynamic context parallelism ({given.where['packing']})"
    if space.experts or "hybrid_layer_pattern" in space.flags or given.objective == "masked":
        yield f"{name} is for dense decoder-only models; write yes, without dynamic context parallelism"
    if (given.zero_stage or 0) > 1:
        yield f"{name} needs ZeRO stage 1, not {given.zero_stage} ({given.where['zero_stage']}); use 1"
    if (given.pipeline_parallel or 1) > 1:
        yield f"{name} needs one stage, not {given.pipeline_parallel} ({given.where['pipeline_parallel']}); use 1"
    dropped = [field for field in ("attention_dropout", "hidden_dropout") if space.flags.get(field, 0.1)]
    if dropped:
        yield f"{name} does not go with dropout, which this architecture has; use one like Llama"


_AXES = {"tensor_parallel": "TP", "pipeline_parallel": "PP", "context_parallel": "CP", "data_parallel": "DP"}


def _wrong_products(space: Space) -> Iterator[str]:
    given = space.specification
    sizes = {field: size for field in _AXES if (size := getattr(given, field)) is not None}
    product = 1
    for size in sizes.values():
        product *= size
    text = " x ".join(f"{_AXES[field]} {size} ({given.where[field]})" for field, size in sizes.items())
    if space.gpus % product:
        near = " or ".join(map(str, nearest_divisors(space.gpus, product)))
        yield f"{text} is {product}, which does not divide {space.gpus} GPUs; use sizes whose product is {near}"
    elif len(sizes) == 4 and product != space.gpus:
        data = space.gpus * sizes["data_parallel"] // product
        yield f"{text} is {product}, and there are {space.gpus} GPUs; use DP {data} or {product} GPUs"


def refuse_contradictions(space: Space) -> None:
    """Raises UserError with all contradictions, one a line."""
    if problems := list(contradictions(space)):
        raise UserError("\n".join(problems))
