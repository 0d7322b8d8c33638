"""How a model is split over ranks, and what its communication looks like.

`ModelParallelConfig` is what every parallel part of the library is configured by; `TransformerConfig` extends it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron.core.config_fields import flag, not_a_flag, not_yet, refuse, too_small, unsupported_values

_OLD_OVERLAP = "these switches went with old Transformer Engine releases"


@dataclass
class ModelParallelConfig:
    """Sizes of the grid of ranks, number formats, and how the ranks exchange data.

    Raises UserError when a value is impossible or its feature is still to come.
    """

    # Model parallelism -----------------------------------------------------------------------------------------------

    tensor_model_parallel_size: int = 1
    """Ranks that share the matrices of one layer."""

    pipeline_model_parallel_comm_backend: Literal["nccl", "ucc"] | None = flag(
        None,
        supported=[None, "nccl"],
        no_effect="pipeline stages exchange over the communication library of all other groups",
    )
    """Communication library between pipeline stages, where it is not that of the other groups."""

    pipeline_model_parallel_size: int = 1
    """Stages that the layers are cut into."""

    virtual_pipeline_model_parallel_size: int | None = not_a_flag(None)
    """Model chunks that one pipeline stage holds (interleaved schedule); None: one."""

    sequence_parallel: bool = flag(False, only_with="tensor_model_parallel_size")
    """Split norms, dropout and residuals over the tensor parallel ranks, along the sequence."""

    context_parallel_size: int = 1
    """Ranks that share one sequence, attention included."""

    hierarchical_context_parallel_sizes: list[int] | None = flag(None, only_with="context_parallel_size")
    """Sizes of the levels of `--cp-comm-type a2a+p2p`; their product is the context parallel size."""

    max_seqlen_per_dp_cp_rank: int | None = flag(None, only_with="hybrid_context_parallel")
    """Longest part of a packed sequence that one rank takes under hybrid context parallelism."""

    hybrid_context_parallel: bool = not_yet(False)
    """Give each packed sequence as many context parallel ranks as its length needs."""

    expert_model_parallel_size: int = 1
    """Ranks that the experts of a layer are spread over."""

    expert_tensor_parallel_size: int | None = flag(None, only_with="num_moe_experts")
    """Ranks that share the matrices of one expert; as --tensor-model-parallel-size when not given."""

    moe_extended_tp: bool = flag(False, no_effect="--expert-tensor-parallel-size took its place")
    """Of older releases: split experts over tensor parallel ranks too."""

    # Initial values --------------------------------------------------------------------------------------------------

    perform_initialization: bool = flag(True, off="--no-initialization")
    """Draw initial weights; without, they hold whatever was in memory until a checkpoint is loaded."""

    use_cpu_initialization: bool = flag(False, no_effect="initial weights are the same numbers wherever they are drawn")
    """Draw initial weights on the CPU."""

    # Number formats --------------------------------------------------------------------------------------------------

    fp16: bool = False
    """Compute in float16, with a loss scale; float32 main weights and gradients."""

    bf16: bool = False
    """Compute in bfloat16; float32 main weights and gradients."""

    params_dtype: torch.dtype = not_a_flag(torch.float32)
    """Type of the weights that layers compute with; follows fp16, bf16 and fp64."""

    # Hooks of the training loop --------------------------------------------------------------------------------------

    timers: Callable[..., Any] | None = not_a_flag(None)
    """Named timers (megatron.core.Timers)."""

    finalize_model_grads_func: Callable[..., Any] | None = not_a_flag(None)
    """Called with (model chunks, number of tokens) when all micro-batches of a step are done."""

    grad_scale_func: Callable[..., Any] | None = not_a_flag(None)
    """Multiplies the loss by the loss scale."""

    no_sync_func: Callable[..., Any] | list[Callable[..., Any]] | None = not_a_flag(None)
    """Gives a context in which gradients are accumulated without being reduced."""

    grad_sync_func: Callable[..., Any] | None = not_a_flag(None)
    """Starts the reduction of the gradients of given parameters."""

    param_sync_func: Callable[..., Any] | None = not_a_flag(None)
    """Starts the all-gather of given parameters."""

    # Arithmetic ------------------------------------------------------------------------------------------------------

    deterministic_mode: bool = False
    """Only kernels whose result is the same at every run. Slower on a GPU."""

    enable_autocast: bool = not_a_flag(False)
    """Run the forward pass under torch.autocast."""

    autocast_dtype: torch.dtype | None = not_a_flag(None)
    """Type of that autocast; as params_dtype when None."""

    num_microbatches_with_partial_activation_checkpoints: int | None = not_a_flag(None)
    """Micro-batches in flight for which only part of the layers recompute their activations."""

    # Fusions and tensor parallel overlap -----------------------------------------------------------------------------

    gradient_accumulation_fusion: bool = flag(
        False,
        off="--no-gradient-accumulation-fusion",
        no_effect="weight gradients always accumulate in the product itself, without a kernel to build",
    )
    """Accumulate weight gradients inside the matrix product."""

    async_tensor_model_parallel_allreduce: bool = flag(
        True,
        off="--no-async-tensor-model-parallel-allreduce",
        aliases=["--disable-async-tensor-model-parallel-allreduce"],
        no_effect="the overlap is always on",
    )
    """Reduce input gradients of a linear layer while its weight gradient is computed."""

    use_te_rng_tracker: bool = not_a_flag(False)
    """Use Transformer Engine's generator states; ours need none."""

    tp_comm_overlap: bool = flag(
        False,
        no_effect="tensor parallel communication always runs beside those products of its layer that do not wait for "
        "it; cutting a product into pieces to hide the rest is not yet there",
    )
    """Overlap tensor parallel communication with the matrix products beside it."""

    tp_comm_bulk_wgrad: bool = flag(
        True, off="--disable-tp-comm-bulk-wgrad", aliases=["--no-tp-comm-bulk-wgrad"], only_with="tp_comm_overlap"
    )
    """With --tp-comm-overlap: gather inputs while input gradients are computed."""

    tp_comm_bulk_dgrad: bool = flag(
        True, off="--disable-tp-comm-bulk-dgrad", aliases=["--no-tp-comm-bulk-dgrad"], only_with="tp_comm_overlap"
    )
    """With --tp-comm-overlap: reduce-scatter while weight gradients are computed."""

    tp_comm_overlap_ag: bool = flag(
        True, off="--disable-tp-comm-overlap-ag", aliases=["--no-tp-comm-overlap-ag"], only_with="tp_comm_overlap"
    )
    """With --tp-comm-overlap: pipeline all-gathers with their products."""

    tp_comm_overlap_rs: bool = flag(
        True, off="--disable-tp-comm-overlap-rs", aliases=["--no-tp-comm-overlap-rs"], only_with="tp_comm_overlap"
    )
    """With --tp-comm-overlap: pipeline reduce-scatters with their products."""

    tp_comm_overlap_rs_dgrad: bool = flag(False, only_with="tp_comm_overlap")
    """With --tp-comm-overlap: pipeline reduce-scatters with the products of input gradients."""

    tp_comm_split_ag: bool = flag(
        True, off="--disable-tp-comm-split-ag", aliases=["--no-tp-comm-split-ag"], no_effect=_OLD_OVERLAP
    )
    """Of older releases: split all-gathers into pieces."""

    tp_comm_atomic_ag: bool = not_a_flag(False)
    """Of older releases: all-gather with atomic kernels."""

    tp_comm_split_rs: bool = flag(
        True, off="--disable-tp-comm-split-rs", aliases=["--no-tp-comm-split-rs"], no_effect=_OLD_OVERLAP
    )
    """Of older releases: split reduce-scatters into pieces."""

    tp_comm_atomic_rs: bool = not_a_flag(False)
    """Of older releases: reduce-scatter with atomic kernels."""

    cross_entropy_loss_fusion: bool = flag(False, no_effect="cross entropy has one implementation, which is fused")
    """Compute the cross entropy in one kernel."""

    cross_entropy_fusion_impl: Literal["native", "te"] = flag(
        "native", no_effect="cross entropy has one implementation, which is fused"
    )
    """Whose fused cross entropy to use."""

    tp_comm_overlap_disable_qkv: bool = not_a_flag(False)
    """With tp_comm_overlap: leave the QKV projection out."""

    tp_comm_overlap_disable_fc1: bool = not_a_flag(False)
    """With tp_comm_overlap: leave the first linear layer of the MLP out."""

    tp_comm_bootstrap_backend: Literal["nccl", "mpi", "gloo"] = flag("nccl", only_with="tp_comm_overlap")
    """Library that sets up the overlapped tensor parallel communication."""

    overlap_moe_expert_parallel_comm: bool = flag(False, only_with="num_moe_experts")
    """Hide the exchange of tokens between experts: a micro-batch's forward and the backward of the one before take
    turns, and one computes while the other's tokens are under way. A rank then holds the activations of one micro-batch
    (with virtual pipeline stages: of one chunk) more. The numbers are the same. A pipeline needs virtual stages."""

    delay_wgrad_compute: bool = flag(False, only_with="overlap_moe_expert_parallel_comm")
    """With --overlap-moe-expert-parallel-comm: products that give weight gradients wait until their backward has an
    exchange under way, which they hide before the other micro-batch does."""

    ep_overlap_early_attn_memory_release: bool = flag(
        False, no_effect="backward gives each activation's memory back as soon as it is done with it"
    )
    """With --overlap-moe-expert-parallel-comm: free attention's activations early."""

    # Pipeline --------------------------------------------------------------------------------------------------------

    pipeline_schedule: Literal["1f1b", "interleaved", "zb-h1", "zb-v"] | None = flag(
        None, only_with="pipeline_model_parallel_size"
    )
    """Order of work on the pipeline's stages: 1f1b; interleaved (several model chunks a rank); zb-h1 (1f1b with weight
    gradients late, in its bubbles); zb-v (the same with two chunks a rank, first and last stage on the first rank).
    When not given: interleaved with virtual stages, else 1f1b."""

    pipeline_dtype: torch.dtype | None = not_a_flag(None)
    """Type of what pipeline stages exchange; as params_dtype when None."""

    variable_seq_lengths: bool = not_a_flag(False)
    """Sequence lengths differ between micro-batches; stages tell each other."""

    overlap_p2p_comm: bool = flag(False, off="--no-overlap-p2p-communication", only_with="pipeline_model_parallel_size")
    """Exchange activations between stages while they compute."""

    batch_p2p_comm: bool = not_a_flag(True)
    """Post sends and receives of a stage as one batch."""

    batch_p2p_sync: bool = not_a_flag(True)
    """Synchronise the device after a batch of sends and receives."""

    use_ring_exchange_p2p: bool = flag(False, no_effect="it needs a torch that was built with ring_exchange")
    """Exchange activations with a kernel that only a special build of torch has."""

    deallocate_pipeline_outputs: bool = not_a_flag(False)
    """Free a stage's output once the next stage has it."""

    defer_embedding_wgrad_compute: bool = flag(
        False, no_effect="weight gradients of all layers are put off by --pipeline-schedule zb-h1 or zb-v"
    )
    """Compute the output layer's weight gradient while the pipeline drains."""

    wgrad_deferral_limit: int = flag(0, only_with="defer_embedding_wgrad_compute")
    """Micro-batches for which it is put off; 0: all."""

    overlap_p2p_comm_warmup_flush: bool = flag(
        False,
        on="--overlap-p2p-communication-warmup-flush",
        no_effect="unless --no-overlap-p2p-communication is given, the exchange is overlapped everywhere",
    )
    """Overlap the exchange between stages in warm-up and drain too."""

    microbatch_group_size_per_vp_stage: int | None = flag(
        None,
        on="--microbatch-group-size-per-virtual-pipeline-stage",
        only_with="pipeline_model_parallel_size",
    )
    """Micro-batches that a model chunk runs in a row; as --pipeline-model-parallel-size when not given."""

    mtp_standalone: bool = flag(False, only_with="mtp_num_layers")
    """The multi-token prediction layers have a pipeline stage of their own: known from
    --pipeline-model-parallel-layout, without which it is refused."""

    # Offloading of activations ---------------------------------------------------------------------------------------

    cpu_offloading: bool = not_a_flag(False)
    """Keep activations of some layers in host memory."""

    cpu_offloading_num_layers: int = not_yet(0)
    """Layers whose activations are kept in host memory."""

    _cpu_offloading_context: AbstractContextManager[Any] | None = not_a_flag(None)
    """The context under which activations are moved."""

    cpu_offloading_activations: bool = not_a_flag(True)
    """With cpu_offloading: move activations."""

    cpu_offloading_weights: bool = not_a_flag(False)
    """With cpu_offloading: move weights."""

    cpu_offloading_double_buffering: bool = not_a_flag(False)
    """With cpu_offloading: use two buffers in turn."""

    # Timing ----------------------------------------------------------------------------------------------------------

    barrier_with_L1_time: bool = flag(True, off="--no-barrier-with-level-1-timing")
    """Put a barrier before timers of level 1 and below are read, so that they compare over ranks."""

    # Ours ------------------------------------------------------------------------------------------------------------

    seed: int = 1234
    """Seed of initial weights, dropout and data order. Larger than 0."""

    fp64: bool = False
    """Compute in float64: slow, but exact enough to compare layouts. Only the cosines and sines of rotary positions
    are float32, as in other formats."""

    def __post_init__(self) -> None:
        refuse([*unsupported_values(self), *parallel_problems(self)], self)
        if self.tensor_model_parallel_size == 1:
            self.sequence_parallel = False
        chosen = {self.fp16: torch.float16, self.bf16: torch.bfloat16, self.fp64: torch.float64}.get(True)
        if chosen is not None:
            self.params_dtype = chosen
        if self.pipeline_dtype is None:
            self.pipeline_dtype = self.params_dtype


_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def parallel_problems(config: Any) -> Iterator[str]:
    """A problem for each impossible value; `config` has the fields of ModelParallelConfig."""
    formats = [f"{{{name}}}" for name in ("fp16", "bf16", "fp64") if getattr(config, name)]
    if len(formats) > 1:
        yield f"{' and '.join(formats)} are set together; choose one"
    if config.seed <= 0:
        yield "{seed} must be larger than 0"
    yield from too_small(config, _SIZES, 1)
