"""The peak memory of each kind of rank of a run."""

import dataclasses
import importlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.core.backends import triton_backend
from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.action_lists import rank_actions
from megatron.core.pipeline_parallel.orders import Schedule
from megatron.core.pipeline_parallel.schedules import schedule_of
from megatron.core.pipeline_parallel.stage_map import StageModules, stage_map
from megatron.core.pipeline_parallel.stages import pipeline_of
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.data.tokenizer.base import Tokenizer
from megatron.diagnosis.memory.as_on_gpu import as_on_gpu
from megatron.diagnosis.memory.chunk_bytes import ChunkBytes, ChunkCounter
from megatron.diagnosis.memory.over_actions import MicroBatchPeak, host_peak_of_actions, peak_of_actions
from megatron.diagnosis.memory.rank_memory import BuiltChunks, MemoryBytes, build_chunks, memory_of_shard, shard_of
from megatron.diagnosis.memory.repeated_layers import count_repeated, layer_kind
from megatron.training.batch_schedule import BatchSchedule
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.providers import Providers
from megatron.training.setup.set_up import resolve_auto_layout, vocabulary_rows

CONTEXT_BYTES = 550 * 2**20
"""What a process takes on an H200 before its first tensor: CUDA's context and the loaded kernels."""
NCCL_BYTES = 400 * 2**20
"""What NCCL takes outside torch's allocator in a run of several ranks."""
WORKSPACE_BYTES = 64 * 2**20
"""Workspace of cuBLAS and cuBLASLt on Hopper, in torch's allocator."""


BUSIEST_EXPERTS = 1.25
"""Rows of the rank with the busiest experts, divided by the mean over ranks: that of MOE64/ep2 in docs/benchmarks.md.
Ranks that swap experts, and forced balance, are even."""


@dataclass(frozen=True)
class RankPeak:
    """The bytes that one kind of rank holds at the moment of a step at which it holds most."""

    rank: int
    """The first rank of its kind."""
    ranks: int
    """Number of ranks that hold the same."""
    weights: int
    """Weights, with quantised copies that fp8 layers keep."""
    gradients: int
    optimizer: int
    activations: int
    """All tensors of micro-batches but `logits`."""
    logits: int
    """Logits, and what the head and the loss make from them."""
    buffers: int
    """Gathered weights and gradients, hidden states between stages."""
    workspace: int
    """Scratch memory of libraries, from torch's allocator."""
    context: int
    """CUDA's context and NCCL's buffers, outside torch's allocator."""
    host: int = 0
    """Activations in host memory, at their own peak."""

    @property
    def allocated(self) -> int:
        """The peak of torch's allocator: the sum of all but `context`."""
        return self.state + self.activations + self.logits + self.buffers + self.workspace

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class _Vocabulary:
    """Stands for the tokenizer, of which only the number of ids is needed."""

    vocab_size: int


def peaks_of_ranks(
    config: PretrainConfig,
    providers: Providers | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    imbalance: float | None = None,
    pipeline_ranks: Collection[int] | None = None,
) -> tuple[RankPeak, ...]:
    """Returns the peak of each kind of rank, in the order of pipeline ranks. Needs no data, device or process group.
    `providers`: the functions of the run's script; default: those of the entry script of the model's family.
    `tokenizer`: that of the run; default: --vocab-size stands for it. `imbalance`: rows of the experts of the busiest
    rank, divided by the mean; default: `imbalance_of`. `pipeline_ranks`: only these; default: all.

    Raises UserError if the vocabulary's size is not given, or if a part of the model cannot be built."""
    if tokenizer is None and config.tokenizer.vocab_size is None:
        raise UserError("--vocab-size: the memory of embedding and head depends on it; give the vocabulary's size")
    if tokenizer is None:
        has_end = config.tokenizer.family == "NullTokenizer"  # whose end of a document is one id more
        tokenizer = cast(Tokenizer, _Vocabulary((config.tokenizer.vocab_size or 0) + has_end))
    peaks = _Peaks(config, providers or providers_of_family(config), tokenizer, imbalance)
    return tuple(peaks.all(pipeline_ranks))


def peaks_or_reason(
    config: PretrainConfig, providers: Providers, tokenizer: Tokenizer
) -> tuple[tuple[RankPeak, ...], str]:
    """Returns the peaks of a run's ranks, or none and the reason: a user's model may read values of tensors, which do
    not exist here."""
    try:
        return peaks_of_ranks(config, providers, tokenizer), ""
    except Exception as error:  # a model of a user may raise anything
        lines = str(error).strip().splitlines() or [""]
        return (), f"{type(error).__name__}: {lines[0]}"


def peak_of(config: PretrainConfig, providers: Providers, tokenizer: Tokenizer) -> int:
    """Returns the bytes that the fullest rank allocates. Raises UserError if a part of the model cannot be built."""
    return max(peak.allocated for peak in peaks_of_ranks(config, providers, tokenizer))


def imbalance_of(config: PretrainConfig) -> float:
    """Returns the rows of the rank with the busiest experts, divided by the mean, that a prediction assumes."""
    transformer = config.transformer
    even = transformer.expert_model_parallel_size == 1
    return 1.0 if even or transformer.moe_router_force_load_balancing else BUSIEST_EXPERTS


def providers_of_family(config: PretrainConfig) -> Providers:
    """Returns the providers of the entry script of a config's model family. Raises UserError if the script cannot be
    imported."""
    family = config.model.model_family or "gpt"
    name = "pretrain_mamba" if family == "gpt" and config.transformer.hybrid_layer_pattern else f"pretrain_{family}"
    try:
        script = importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{name}.py is not on Python's path: start in its folder, or give providers") from error
    return Providers(script.build_model, script.build_datasets, script.build_forward_step)


class _Peaks:
    def __init__(
        self, config: PretrainConfig, providers: Providers, tokenizer: Any, imbalance: float | None = None
    ) -> None:
        self.padded = vocabulary_rows(config, tokenizer)
        config, _ = resolve_auto_layout(config, self.padded)
        self.config, self.providers, self.tokenizer = _as_planned(config), providers, tokenizer
        transformer = self.config.transformer
        self.pipeline, self.stages = pipeline_of(transformer), stage_map(transformer)
        length = config.data.seq_length
        batches = BatchSchedule.from_config(config.training, config.grid.data, length)
        self.imbalance = imbalance_of(config) if imbalance is None else imbalance
        self.num_microbatches = batches.final_num_microbatches
        self._chunks: dict[Any, ChunkBytes] = {}

    def all(self, pipeline_ranks: Collection[int] | None = None) -> Iterator[RankPeak]:
        """Yields the peak of each pipeline rank, or of some."""
        schedule = self._schedule()
        built: dict[Any, tuple[MemoryBytes, Sequence[ChunkBytes]]] = {}
        for pp_rank in range(self.pipeline.pipeline_size):
            if pipeline_ranks is not None and pp_rank not in pipeline_ranks:
                continue
            parts = [self.stages.stage_at(pp_rank, chunk) for chunk in range(self.stages.chunks)]
            key = tuple(self._kind(part) for part in parts)
            rank = self.config.grid.group(0, ("pp",))[pp_rank]
            if key not in built:
                built[key] = self._count(rank, parts)
            memory, chunks = built[key]
            actions = rank_actions(schedule, pp_rank)
            peak, host = peak_of_actions(actions, chunks), host_peak_of_actions(actions, chunks)
            yield dataclasses.replace(self._rank_peak(rank, memory, chunks, peak), host=host)

    def _schedule(self) -> Schedule:
        """Returns the schedule, with only so many micro-batches that more change nothing."""
        steady = 4 * self.pipeline.num_stages + 4
        return schedule_of(self.config.transformer, self.pipeline, min(self.num_microbatches, steady), False)

    def _kind(self, stage: StageModules) -> object:
        """Returns a key that is equal for stages with the same modules."""
        config = self.config.transformer
        kinds = tuple(layer_kind(config, number) for number in stage.layers)
        return kinds, len(stage.encoder_layers), stage.embedding, stage.loss, stage.prediction_layers

    def _count(self, rank: int, parts: Sequence[StageModules]) -> tuple[MemoryBytes, Sequence[ChunkBytes]]:
        built = build_chunks(self.config, self.providers, self.tokenizer, self.padded, rank)
        memory = memory_of_shard(shard_of(built, self.config), self.config)
        defers = self.config.transformer.pipeline_schedule in ("zb-h1", "zb-v") and self.pipeline.num_stages > 1
        with built.as_current(self.providers, self.padded):
            counter = ChunkCounter(
                built.context, self.providers.build_forward_step(built.context), self.num_microbatches
            )
            with as_on_gpu(self._counts_on_host(built)):
                for chunk, part in zip(built.chunks, parts, strict=True):
                    if self._kind(part) not in self._chunks:
                        self._chunks[self._kind(part)] = self._count_chunk(counter, chunk, part, defers)
        return memory, [self._chunks[self._kind(part)] for part in parts]

    def _count_chunk(self, counter: ChunkCounter, chunk: nn.Module, stage: StageModules, defers: bool) -> ChunkBytes:
        transformer = self.config.transformer
        chunk = Float16Module(transformer, chunk) if transformer.fp16 or transformer.bf16 else chunk
        return count_repeated(chunk, transformer, lambda: counter.count(chunk, stage, defers))

    def _counts_on_host(self, built: BuiltChunks) -> Any:
        """Returns the rows of each expert as the host would read them: the experts of this rank are equally busy, and
        busier than those of other ranks."""
        transformer, training = self.config.transformer, self.config.training
        groups = built.context.environment.groups
        experts, chosen = transformer.num_moe_experts or 1, transformer.moe_router_topk
        tokens = training.micro_batch_size * (self.config.data.seq_length or 0) // transformer.context_parallel_size
        tokens //= transformer.tensor_model_parallel_size if transformer.sequence_parallel else 1
        even, sources = tokens * chosen // experts, groups.size("ep") * groups.size("expt_tp")
        others, own = max(groups.size("ep") - 1, 1), groups.rank("ep")
        less = int(even * (self.imbalance - 1)) // others  # the same of each other rank: no row is lost by rounding
        busy = even + less * others

        def counts(tensor: Tensor) -> Tensor:
            if tensor.dim() == 1:  # the experts of this rank
                return torch.full(tensor.shape, busy * sources, dtype=torch.int64)
            if tensor.dim() != 4:
                return torch.full(tensor.shape, even, dtype=torch.int64)
            found = torch.full(tensor.shape, even - less, dtype=torch.int64)
            found[:, :, own] = busy  # [etp, ep, ep, experts of a rank]
            return found

        return counts

    def _rank_peak(
        self, rank: int, memory: MemoryBytes, chunks: Sequence[ChunkBytes], peak: MicroBatchPeak
    ) -> RankPeak:
        head = max(chunk.head for chunk in chunks)
        return RankPeak(
            rank=rank,
            ranks=self.config.world_size // self.pipeline.pipeline_size,
            weights=memory.weights + memory.quantized,
            gradients=memory.gradients,
            optimizer=memory.optimizer,
            activations=peak.total - peak.messages - head,
            logits=head,
            buffers=memory.gathered + peak.messages,
            workspace=WORKSPACE_BYTES,
            context=CONTEXT_BYTES + (NCCL_BYTES if self.config.world_size > 1 else 0),
        )


def _as_planned(config: PretrainConfig) -> PretrainConfig:
    """Returns the config with which chunks are built here: without initial values, with the kernels of a GPU."""
    transformer: TransformerConfig = config.transformer
    kernels = transformer.transformer_impl
    if kernels == "auto" and triton_backend() is not None:
        kernels = "triton"
    planned = dataclasses.replace(transformer, perform_initialization=False, transformer_impl=kernels)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, transformer=planned))
